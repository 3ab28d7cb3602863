"""Lesson 3. Measures the memory that calls of torch allocate. A view takes none; a copy takes what it copies."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode


class NewMemory(TorchFunctionMode):
    """Within it, `peak` counts the most bytes that new tensors took at one time; views of those in `given` are free."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {StorageWeakRef(x.untyped_storage()) for x in given}
        self.live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.note(x)
        return result

    def note(self, x: Tensor) -> None:
        storage = StorageWeakRef(x.untyped_storage())
        if storage not in self.given:
            self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
            self.live[storage] = x.untyped_storage().nbytes()
            self.peak = max(self.peak, sum(self.live.values()))
