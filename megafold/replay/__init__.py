"""What the host does for an operator is done once for each signature; then its launches are repeated by address.

Between a call of an operator and its kernels stand views of tensors, tables of configurations, descriptors, and for
each kernel Triton's search for the compiled one: more time than small kernels take. All of it follows from shapes,
strides, dtypes and alignment. So the second call with the same ones is recorded (`recorder`), and later calls repeat
what was recorded (`tape`): allocations, kernels and the vendor's products with new addresses, and whatever PyTorch did
besides.
Nothing of the tensors is kept, and a call that cannot be recorded runs as written, each time.

As with a CUDA graph, what is repeated may not depend on values of tensors; unlike there, addresses may change, nothing
is held between calls, and a tape can be recorded and repeated while a CUDA graph is captured.
"""

from megafold.replay.cache import ordinary, replayed
from megafold.replay.recorder import launch_kernel, note

__all__ = ["launch_kernel", "note", "ordinary", "replayed"]
