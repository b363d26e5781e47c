"""Trainings that are known to run, or to run out of memory, on given GPUs, each with its source."""

from dataclasses import dataclass, replace

from launcher.fit.gpus import find_gpu
from launcher.fit.memory import estimate_memory
from launcher.fit.training import (
    Device,
    Experts,
    LatentAttention,
    ModelDimensions,
    ParallelLayout,
    Training,
    TrainingSettings,
)


@dataclass(frozen=True, slots=True)
class Published:
    """A training that somebody has published."""

    name: str
    model: ModelDimensions
    gpu: str
    layout: ParallelLayout
    settings: TrainingSettings
    runs: bool
    source: str
    reserved_gib: float | None = None
    """torch.cuda.max_memory_reserved, if it is published."""

    def make_request(self) -> Training:
        """What is asked of the launcher."""
        gpu = find_gpu(self.gpu)
        assert gpu is not None
        each = min(8, self.layout.world_size)
        device = Device(self.gpu, gpu.memory_mib, nvlink_domain=gpu.nvlink_domain)
        nodes = self.layout.world_size // each
        return Training(self.model, self.layout, self.settings, device, each, nodes, is_bundled=False)


def make_gpt(name: str, layers: int, hidden: int, heads: int, **others: object) -> ModelDimensions:
    """A model of GPT-3's kind."""
    shape = (51200, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 2048)
    model = ModelDimensions(
        name, *shape, norm="layernorm", mlp="gelu", position="learned", bias=True, tied_embeddings=True
    )
    return replace(model, **others)  # type: ignore[arg-type]  # of several types


def make_mpt(name: str, layers: int, hidden: int, heads: int, seq_len: int) -> ModelDimensions:
    """A model of MosaicML's llm-foundry."""
    return make_gpt(name, layers, hidden, heads, vocab_size=50368, max_seq_len=seq_len)


LLAMA7B = ModelDimensions("LLaMA 7B", 32000, 32, 4096, 32, 32, 128, 11008, 2048)
LLAMA13B = ModelDimensions("Llama 2 13B", 32000, 40, 5120, 40, 40, 128, 13824, 4096)
LLAMA70B = ModelDimensions("Llama 2 70B", 32000, 80, 8192, 64, 8, 128, 28672, 4096)
LLAMA3_8B = ModelDimensions("Llama 3 8B", 128256, 32, 4096, 32, 8, 128, 14336, 8192)
LLAMA3_70B = replace(LLAMA70B, name="Llama 3 70B", vocab_size=128256, max_seq_len=8192)
LLAMA405B = ModelDimensions("Llama 3.1 405B", 128256, 126, 16384, 128, 8, 128, 53248, 8192)
MIXTRAL = ModelDimensions(
    "Mixtral 8x7B", 32000, 32, 4096, 32, 8, 128, 14336, 32768, experts=Experts(8, 2, 14336)
)
DEEPSEEK = ModelDimensions(
    "DeepSeek-V3",
    *(129280, 61, 7168, 128, 128, 192, 18432, 4096),
    experts=Experts(256, 8, 2048, shared=1, dense_layers=3, router_bias=True),
    latent_attention=LatentAttention(1536, 512, 64, 128, 128),
)
GPT2 = make_gpt("GPT-2 124M", 12, 768, 12, vocab_size=50304, max_seq_len=1024)
GPT2_XL = make_gpt("GPT-2 1.5B", 48, 1600, 25, vocab_size=50257, max_seq_len=1024)
GPT3 = make_gpt("GPT-3 175B", 96, 12288, 96)
NEOX = make_gpt("GPT-NeoX-20B", 44, 6144, 64, vocab_size=50432, position="rope", tied_embeddings=False)
BLOOM = make_gpt("BLOOM 176B", 70, 14336, 112, vocab_size=250880, position="rope")

TITAN = "torchtitan docs/performance.md"
TITAN_H100 = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
FOUNDRY = "llm-foundry scripts/train/benchmarking/README.md"
KORTHIKANTI = "Korthikanti et al., arXiv:2205.05198, table 3 and figure 1"
MEGATRON = "Narayanan et al., arXiv:2104.04473, table 1"
ZERO = "ZeRO, arXiv:1910.02054"


def shard(gpus: int, **others: object) -> ParallelLayout:
    """Fully sharded data parallelism."""
    return replace(ParallelLayout(dp=gpus, zero=3), **others)  # type: ignore[arg-type]  # of several types


def fsdp(seq_len: int, micro_batch: int, checkpointing: str = "none", **others: object) -> TrainingSettings:
    """Mixed precision with FSDP."""
    chosen = TrainingSettings(
        framework="fsdp", seq_len=seq_len, micro_batch=micro_batch, checkpointing=checkpointing
    )
    return replace(chosen, expandable_segments=False, **others)  # type: ignore[arg-type]  # of several types


def megatron(micro_batch: int, accumulation: int, checkpointing: str, **others: object) -> TrainingSettings:
    """Megatron-LM with 16-bit weights, fp32 masters and gradients, sequences of 2048."""
    chosen = TrainingSettings(
        framework="megatron",
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
        flash_attention=False,
        expandable_segments=False,
    )
    return replace(chosen, **others)  # type: ignore[arg-type]  # of several types


def list_korthikanti() -> list[Published]:
    """Four models on A100-80GB: with sequence parallelism and selective recomputation, and without both."""
    shapes = (
        ("22B", make_gpt("22B", 48, 6144, 64), ParallelLayout(tp=8), 4, 1),
        ("175B", GPT3, ParallelLayout(tp=8, pp=8, virtual_stages=3), 1, 64),
        (
            "530B",
            make_gpt("530B", 105, 20480, 128),
            ParallelLayout(tp=8, pp=35, virtual_stages=3),
            1,
            280,
        ),
        ("1T", make_gpt("1T", 128, 25600, 160), ParallelLayout(tp=8, pp=64), 1, 512),
    )
    found = []
    for name, model, layout, micro, steps in shapes:
        selective, plain = megatron(micro, steps, "selective"), megatron(micro, steps, "none")
        apart = replace(layout, sequence_parallel=False)
        found += [
            Published(f"{name} tp+sp selective", model, "A100-80GB", layout, selective, True, KORTHIKANTI),
            Published(f"{name} tp alone", model, "A100-80GB", apart, plain, False, KORTHIKANTI),
        ]
    return found


def list_megatron() -> list[Published]:
    """The weak scaling of Megatron-LM on A100-80GB, all activations computed again; micro-batches of 1."""
    rows = (  # billions, layers, hidden, heads, tp, pp, GPUs, batch
        (1.7, 24, 2304, 24, 1, 1, 32, 512),
        (3.6, 30, 3072, 32, 2, 1, 64, 512),
        (7.5, 36, 4096, 32, 4, 1, 128, 512),
        (18.4, 40, 6144, 48, 8, 1, 256, 1024),
        (39.1, 48, 8192, 64, 8, 2, 512, 1536),
        (76.1, 60, 10240, 80, 8, 4, 1024, 1792),
        (145.6, 80, 12288, 96, 8, 8, 1536, 2304),
        (310.1, 96, 16384, 128, 8, 16, 1920, 2160),
        (529.6, 105, 20480, 128, 8, 35, 2520, 2520),
        (1008.0, 128, 25600, 160, 8, 64, 3072, 3072),
    )
    return [
        Published(
            f"Megatron-LM {size}B",
            make_gpt(f"{size}B", layers, hidden, heads),
            "A100-80GB",
            ParallelLayout(tp=tp, pp=pp, dp=gpus // (tp * pp), sequence_parallel=False),
            megatron(1, batch // (gpus // (tp * pp)), "full"),
            True,
            MEGATRON,
        )
        for size, layers, hidden, heads, tp, pp, gpus, batch in rows
    ]


def list_foundry() -> list[Published]:
    """FSDP of MosaicML's models."""
    rows = (  # model, layers, hidden, heads, GPU, GPUs, sequence, micro-batch, checkpointing
        ("70B", 80, 8192, 64, "H100", 64, 2048, 8, "full"),
        ("70B", 80, 8192, 64, "H100", 32, 2048, 2, "full"),
        ("70B", 80, 8192, 64, "A100-40GB", 128, 2048, 4, "full"),
        ("70B", 80, 8192, 64, "A100-40GB", 64, 2048, 2, "full"),
        ("30B", 48, 7168, 56, "H100", 8, 8192, 1, "full"),
        ("30B", 48, 7168, 56, "A100-80GB", 8, 2048, 3, "full"),
        ("13B", 40, 5120, 40, "H100", 8, 2048, 2, "none"),
        ("13B", 40, 5120, 40, "H100", 8, 32768, 1, "full"),
        ("13B", 40, 5120, 40, "A100-40GB", 8, 2048, 4, "full"),
        ("7B", 32, 4096, 32, "A100-80GB", 8, 2048, 6, "none"),
        ("7B", 32, 4096, 32, "H100", 8, 65536, 1, "full"),
        ("7B", 32, 4096, 32, "A100-40GB", 8, 2048, 12, "full"),
        ("3B", 32, 2560, 20, "A100-80GB", 8, 2048, 10, "none"),
        ("1B", 24, 2048, 16, "H100", 8, 2048, 14, "none"),
    )
    return [
        Published(
            f"MPT {size} {gpus} x {gpu}, {length}, {kind}",
            make_mpt(f"MPT {size}", layers, hidden, heads, length),
            gpu,
            shard(gpus),
            fsdp(length, micro, kind),
            True,
            FOUNDRY,
        )
        for size, layers, hidden, heads, gpu, gpus, length, micro, kind in rows
    ]


def list_titan() -> list[Published]:
    """FSDP2 of torchtitan, on 64 A100-80GB and on H100 with 96 GB."""
    a100 = [  # model, sequence, micro-batch, checkpointing, runs
        (LLAMA3_8B, 8192, 1, "selective", True),
        (LLAMA3_70B, 8192, 1, "full", True),
        (LLAMA13B, 4096, 2, "none", True),
        (LLAMA70B, 4096, 1, "selective", True),
        (LLAMA70B, 4096, 2, "full", True),
        (LLAMA70B, 4096, 2, "selective", False),  # "will cause an OOM error"
    ]
    h100 = [  # model, layout, settings, GiB
        (LLAMA3_8B, shard(8), fsdp(8192, 2, "selective"), 82.4),
        (LLAMA3_8B, shard(128), fsdp(8192, 2, "selective"), 67.0),
        (LLAMA3_8B, shard(8), fsdp(32768, 1, "full", precision="fp8"), 83.9),
        (LLAMA3_8B, shard(2, cp=4), fsdp(131072, 1, "full", precision="fp8"), 84.0),
        (LLAMA3_70B, shard(32, tp=8), fsdp(8192, 16, "full", precision="fp8"), 71.9),
        (
            LLAMA405B,
            shard(8, tp=8, pp=8, zero=2),
            fsdp(8192, 4, "full", precision="fp8", accumulation=8),
            82.5,
        ),
    ]
    found = [
        Published(
            f"{model.name} 64 x A100, {micro} of {length}, {kind}",
            model,
            "A100-80GB",
            shard(64),
            fsdp(length, micro, kind),
            runs,
            TITAN,
        )
        for model, length, micro, kind, runs in a100
    ]
    found += [
        Published(
            f"{model.name} {layout.world_size} x H100-96GB, {settings.seq_len}",
            model,
            "H100 96GB",
            layout,
            settings,
            True,
            TITAN_H100,
            gib,
        )
        for model, layout, settings, gib in h100
    ]
    return found


def list_others() -> list[Published]:
    """Settings of single papers and guides."""
    adam = TrainingSettings(expandable_segments=False)
    zero = replace(adam, framework="zero")
    long = "arXiv:2407.21783, section 3.3.2: without activation checkpointing"
    return [
        Published(
            "GPT-2 124M DDP",
            GPT2,
            "A100-40GB",
            ParallelLayout(dp=8),
            replace(adam, micro_batch=12, seq_len=1024),
            True,
            "nanoGPT config/train_gpt2.py",
        ),
        Published(
            "GPT-2 1.5B, batch 32, one GPU",
            GPT2_XL,
            "V100-32GB",
            ParallelLayout(),
            replace(zero, micro_batch=32, seq_len=1024, flash_attention=False),
            False,
            f"{ZERO}, section 3.2: 60 GB of activations",
        ),
        Published(
            "13B ZeRO-2 128 x V100",
            make_gpt("13B", 62, 4096, 32, max_seq_len=1024),
            "V100-32GB",
            ParallelLayout(dp=128, zero=2),
            replace(zero, micro_batch=2, seq_len=1024, checkpointing="full", flash_attention=False),
            True,
            f"{ZERO}, figure 4",
        ),
        Published(
            "13B replicas 128 x V100",
            make_gpt("13B", 62, 4096, 32, max_seq_len=1024),
            "V100-32GB",
            ParallelLayout(dp=128),
            replace(adam, micro_batch=1, seq_len=1024, checkpointing="full", flash_attention=False),
            False,
            f"{ZERO}, section 1: replicas run out of memory beyond 1.4B",
        ),
        Published(
            "13B ZeRO-Offload one V100",
            make_gpt("13B", 65, 4096, 32, max_seq_len=1024),
            "V100-32GB",
            ParallelLayout(zero=2),
            replace(
                zero,
                micro_batch=1,
                seq_len=1024,
                checkpointing="full",
                offload="optimizer",
                flash_attention=False,
            ),
            True,
            "ZeRO-Offload, arXiv:2101.06840, section 6.2.1",
        ),
        Published(
            "LLaMA 7B AdamW one GPU",
            LLAMA7B,
            "A100-80GB",
            ParallelLayout(),
            replace(adam, seq_len=512),
            False,
            "stanford_alpaca README: 7 x 4 x 4 = 112 GB",
        ),
        Published(
            "Alpaca 7B 4 x A100",
            LLAMA7B,
            "A100-80GB",
            shard(4),
            fsdp(512, 4, accumulation=8),
            True,
            "stanford_alpaca README: FSDP full_shard",
        ),
        Published(
            "Vicuna 7B 4 x A100-40GB",
            LLAMA7B,
            "A100-40GB",
            shard(4),
            fsdp(2048, 2, "full", accumulation=16),
            True,
            "FastChat README: FSDP full_shard, gradient checkpointing",
        ),
        Published(
            "Llama 2 70B 16 x A100",
            LLAMA70B,
            "A100-80GB",
            shard(16),
            fsdp(2048, 1, "full"),
            True,
            "huggingface.co/blog/ram-efficient-pytorch-fsdp",
        ),
        Published(
            "Llama 2 70B 8 x H100",
            LLAMA70B,
            "H100",
            shard(8),
            fsdp(2048, 1, "full"),
            False,
            f"{ZERO}, section 3.1: 16 bytes a parameter, 1.1 TB of 640 GB",
        ),
        Published(
            "GPT-3 175B 16 x H100",
            GPT3,
            "H100",
            shard(16),
            fsdp(2048, 1, "full"),
            False,
            f"{ZERO}, section 3.1: 16 bytes a parameter, 2.8 TB of 1.3 TB",
        ),
        Published(
            "GPT-NeoX-20B",
            NEOX,
            "A100-40GB",
            ParallelLayout(tp=2, pp=4, dp=12, zero=1, sequence_parallel=False),
            megatron(4, 32, "full"),
            True,
            "arXiv:2204.06745, section 2",
        ),
        Published(
            "BLOOM 176B",
            BLOOM,
            "A100-80GB",
            ParallelLayout(tp=4, pp=12, dp=8, zero=1, sequence_parallel=False),
            megatron(2, 128, "full"),
            True,
            "arXiv:2211.05100, section 3.4",
        ),
        Published(
            "Llama 3.1 405B",
            LLAMA405B,
            "H100",
            ParallelLayout(tp=8, pp=16, dp=128, zero=2),
            fsdp(8192, 1, accumulation=16, compile=True),  # fused kernels of their own
            True,
            long,
        ),
        Published(
            "Mixtral 8x7B 64 x H100",
            MIXTRAL,
            "H100",
            ParallelLayout(pp=4, dp=16, ep=8, zero=1, virtual_stages=8),
            megatron(1, 16, "none", seq_len=4096, flash_attention=True),
            True,
            "Megatron Core megatron/core/transformer/moe/README.md",
        ),
        Published(
            "Mixtral 8x7B 8 x H100",
            MIXTRAL,
            "H100",
            shard(8),
            fsdp(2048, 1, "full"),
            False,
            f"{ZERO}, section 3.1: 16 bytes a parameter, 747 GB of 640 GB",
        ),
        Published(
            "DeepSeek-V3 2048 x H800",
            DEEPSEEK,
            "H800",
            ParallelLayout(pp=16, dp=128, ep=64, zero=1),
            megatron(1, 120, "selective", seq_len=4096, flash_attention=True, precision="fp8"),
            True,
            "arXiv:2412.19437, section 3",
        ),
        Published(
            "DeepSeek-V3 64 x H800",
            DEEPSEEK,
            "H800",
            ParallelLayout(dp=64, ep=64, zero=1),
            megatron(1, 1, "full", seq_len=4096, flash_attention=True, precision="fp8"),
            False,
            f"{ZERO}, section 3.1: 16 bytes a parameter, 10.7 TB of 5.2 TB",
        ),
    ]


def main() -> None:
    """Print what is published and what is estimated, in GiB."""
    print("| setting | GPU | published | low | expected | high | of | source |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in PUBLISHED:
        request = one.make_request()
        total = estimate_memory(request).total
        ends = (total.low, total.expected, total.high, request.device.memory_mib << 20)
        shown = " | ".join(f"{end / (1 << 30):.0f}" for end in ends)
        print(f"| {one.name} | {one.gpu} | {'runs' if one.runs else 'fails'} | {shown} | {one.source} |")


PUBLISHED = [*list_korthikanti(), *list_megatron(), *list_foundry(), *list_titan(), *list_others()]

if __name__ == "__main__":
    main()
