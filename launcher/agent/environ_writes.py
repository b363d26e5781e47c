"""Which variables a program's source sets, as far as their names stand in it."""

import ast

SETTERS = {"setdefault", "pop", "putenv", "unsetenv", "__setitem__"}
"""Methods of `os.environ`, and functions of `os`, whose first argument is a variable's name."""


def list_written_variables(source: bytes) -> frozenset[str]:
    """Return the names of variables that a program sets or removes; none if it does not parse.

    It is enough that they stand in an assignment to something called `environ`, or in a call of its methods.
    """
    if b"environ" not in source and b"putenv" not in source:
        return frozenset()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(name for node in ast.walk(tree) for name in list_node_writes(node))


def list_node_writes(node: ast.AST) -> list[str]:
    """Return the names that one node of a program sets or removes."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_environ(node.value):
        return list_constants([node.slice])
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    if node.func.attr == "update" and is_environ(node.func.value):
        keys = [key for part in node.args if isinstance(part, ast.Dict) for key in part.keys if key]
        return [*list_constants(keys), *(keyword.arg for keyword in node.keywords if keyword.arg)]
    return list_constants(node.args[:1]) if node.func.attr in SETTERS else []


def is_environ(node: ast.expr) -> bool:
    """Tell whether an expression is called `environ`, of `os` or by itself."""
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def list_constants(nodes: list[ast.expr]) -> list[str]:
    """Return the strings among these expressions."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
