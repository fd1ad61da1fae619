"""Buffers, fragmentation, and the sum that must fit a device.

``states.py`` and ``activations.py`` give the other terms.
"""

from dataclasses import dataclass

__all__ = ["Budget", "bucket_bytes", "fused_buffer_bytes", "overlap_buffer_bytes"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Peak bytes of one rank by what they are for.

    Attributes:
        states: model states at rest.
        activations: kept for backward, or between checkpoints.
        buffers: gathered parameters, gradients under way, fused buffers.
        fragmentation: part of the device's memory that no allocation can use; ZeRO saw over 0.3 in extreme cases.

    Source: ZeRO, arXiv:1910.02054, sections 3.2 and 6.3.
    """

    states: float
    activations: float = 0
    buffers: float = 0
    fragmentation: float = 0

    @property
    def peak(self) -> float:
        """Bytes that live together."""
        return self.states + self.activations + self.buffers

    def fits(self, memory_bytes: float) -> bool:
        """Whether a device with this memory holds it all."""
        return self.peak <= memory_bytes * (1 - self.fragmentation)

    def free(self, memory_bytes: float) -> float:
        """Bytes that are left on a device; below 0 if it does not fit."""
        return memory_bytes * (1 - self.fragmentation) - self.peak


def fused_buffer_bytes(num_params: float, *, bytes_per_element: float = 4) -> float:
    """Return the bytes of a buffer that holds every gradient, and so grows with the model.

    Source: ZeRO, arXiv:1910.02054, sections 3.2 and 6.2.
    """
    return num_params * bytes_per_element


def bucket_bytes(bucket_numel: float, *, num_buckets: int = 2, bytes_per_element: float = 2) -> float:
    """Return the bytes of buffers of a constant size (C_B): the same for every model.

    Args:
        bucket_numel: elements of one bucket.
        num_buckets: in flight together.
        bytes_per_element: of the dtype that travels.

    Source: ZeRO, arXiv:1910.02054, section 6.2.
    """
    return bucket_numel * num_buckets * bytes_per_element


def overlap_buffer_bytes(reduce_bucket_numel: float, gather_bucket_numel: float) -> float:
    """Return the bytes that DeepSpeed's ``overlap_comm`` takes: 4.5 times both buckets, 2 bytes an element.

    Source: Hugging Face Transformers, DeepSpeed documentation, ``overlap_comm``.
    """
    return 4.5 * 2 * (reduce_bucket_numel + gather_bucket_numel)
