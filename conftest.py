"""What pytest leaves out: modules whose own library cannot be installed everywhere."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("triton") else [f"src/fedcontext/engines/torch/{name}.py" for name in ("fused", "fused_kernels")]
)
