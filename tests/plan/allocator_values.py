"""Values of the allocator's settings by kind: those that the table takes, and those that it does not."""

CORE = (
    *(
        "large_segment_size_mb",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
    ),
    *("roundup_power2_divisions", "expandable_segments", "pinned_use_background_threads"),
    *("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"),
)
"""Settings of all accelerators, which a CPU build of torch reads, too."""
RIGHT = {
    "bool": ("True", "False"),
    "whole": ("64", "2147483647"),
    "power": ("1", "8", "128"),
    "fraction": ("0.8", ".5", "1e-3", "0.999"),
    "share": ("0", "1", "0.5"),
    "backend": ("native", "cudaMallocAsync"),
    "divisions": ("1", "4", "[256:1]", "[256:1,512:0,1024:4,>:8]", "[>:8]"),
    "reserve": ("0.5", "40G", "1.5g"),
    "reserves": ("[serving:0.25,capture:8G]",),
}
WRONG = {
    "bool": ("true", "TRUE", "1", "yes", "", "None"),
    "whole": ("", "abc", "64abc", "1.5", "-1", "1e3", "99999999999", "²", "[64]"),
    "power": ("0", "3", "256", "-2", "x"),
    "fraction": ("0", "1", "1.5", "-0.1", "x", "nan", "0_1.5", ""),
    "share": ("-0.1", "1.1", "nan", "half"),
    "backend": ("cudamallocasync", "native ", "async"),
    "divisions": (
        "0",
        "3",
        "x",
        "[]",
        "[256:3]",
        "[3:1]",
        "[0:1]",
        "[256]",
        "[256:1",
        "[256:1;512:2]",
        "[15361]",
    ),
    "reserve": ("0", "-1G", "G", "inf", "40M"),
    "reserves": ("[]", "0.5", "[serving]", "[serving:0]", "[:1G]"),
}
LAX = frozenset({"64abc", "1.5", "-1", "1e3", "99999999999", "[]", "[64]"})
"""Wrong values that torch takes all the same, for something else than they look like."""
