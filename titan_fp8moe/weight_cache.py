"""`QuantizedWeightCache`: FP8 weights of an experts module, kept from forward to forward until they change."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class _Seen:
    """What a parameter was when it was quantised, without keeping it alive."""

    def __init__(self, parameter: nn.Parameter, local: Tensor):
        self.parameter = weakref.ref(parameter)
        # An address can be given out again, a storage that is weakly referenced cannot.
        self.storage = StorageWeakRef(local.untyped_storage())
        # In-place operations on a DTensor are counted on it alone, those on its shard on the shard alone.
        self.versions = (parameter._version, local._version)

    def is_current(self, parameter: nn.Parameter, local: Tensor) -> bool:
        return (
            self.parameter() is parameter
            and self.storage == StorageWeakRef(local.untyped_storage())
            and self.versions == (parameter._version, local._version)
        )


class QuantizedWeightCache:
    """The FP8 form of one module's weights, made when it is asked for and kept until a weight changes or `clear`.

    A weight has changed when it is another parameter, or has other storage, or torch counted an in-place operation on
    it. torch does not count writes through ``.data`` or a NumPy view, those of optimizers with ``fused=True``, and
    those by which FSDP gathers weights. So whoever steps the optimizer calls `clear` afterwards; a write that is not
    counted and comes between two forward passes of one step needs a `clear` of its own.

    Copies and pickles start empty.

    Args:
        quantize: makes the FP8 form of local weights.
    """

    def __init__(self, quantize: Callable[..., tuple[Tensor, ...]]):
        self._quantize = quantize
        self.clear()

    def __reduce__(self):
        return QuantizedWeightCache, (self._quantize,)

    def clear(self) -> None:
        """Free the FP8 weights; the next `get` quantises."""
        self._seen: list[_Seen] = []
        self._quantized: tuple[Tensor, ...] | None = None

    def get(self, parameters: Sequence[nn.Parameter], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The FP8 form of ``weights``.

        Args:
            parameters: of the module.
            weights: what is quantised: each parameter, or its shard on this device.
        """
        if self._quantized is not None:
            pairs = zip(self._seen, parameters, weights, strict=True)
            if all(seen.is_current(parameter, local) for seen, parameter, local in pairs):
                return self._quantized
        self.clear()
        with torch.no_grad():
            quantized = self._quantize(*weights)
        # Tensors made in inference mode cannot be saved for a later backward pass, fake ones hold nothing.
        if not quantized[0].is_inference() and type(quantized[0]) is Tensor:
            self._seen = [_Seen(*pair) for pair in zip(parameters, weights, strict=True)]
            self._quantized = quantized
        return quantized
