"""What machines have: devices, hosts, links. Numbers of data sheets and papers, nothing measured here.

Bytes are decimal (GB = 1e9), rates per second. ``SHAPES`` has the models for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CPU_ADAM_PARAMS_PER_SECOND", "DEVICES", "DGX2", "Cluster", "Device", "Host", "Range"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """A number that a source gives as a range."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: of the data sheet.
        memory_bytes: of its own memory.
        peak_flops: dense FLOP/s in 16-bit precision.
        memory_bandwidth: bytes/s of its own memory.
    """

    name: str
    memory_bytes: float
    peak_flops: float
    memory_bandwidth: float


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "v100-32gb": Device(name="V100 32GB HBM2", memory_bytes=32e9, peak_flops=125e12, memory_bandwidth=900e9),
        "a100-40gb": Device(name="A100 40GB HBM2", memory_bytes=40e9, peak_flops=312e12, memory_bandwidth=1555e9),
        "a100-80gb": Device(name="A100 80GB HBM2e", memory_bytes=80e9, peak_flops=312e12, memory_bandwidth=2039e9),
        "h100-80gb": Device(name="H100 80GB HBM3", memory_bytes=80e9, peak_flops=989e12, memory_bandwidth=3350e9),
        "h200-141gb": Device(name="H200 141GB HBM3e", memory_bytes=141e9, peak_flops=989e12, memory_bandwidth=4800e9),
    }
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine with several devices.

    Attributes:
        device: each of its devices.
        num_devices: in one host.
        devices_memory_bytes: of all devices, as the source prints it.
        processors: of the host.
        memory: of the host, as the source prints it.
        memory_bytes: of the host.
        disk_bytes: NVMe.
        single_bandwidth: bytes/s between one device and host memory or disk, when it alone uses them.
        host_bandwidth: bytes/s per device between device and host memory, when all use it.
        disk_bandwidth: bytes/s per device between device and disk, when all use it.
        link_bandwidth: bytes/s of the link of one device to the host, both directions.
        device_memory_bandwidth: bytes/s of a device's own memory.
        inside_bandwidth: bytes/s between devices of a host.
        across_bandwidth: bytes/s between devices of two hosts.
        switch_bandwidth: bytes/s per device of the switch inside.
        network_link_bandwidth: bytes/s of one link of the network.
        network_bits: bits/s of all links of the host.
    """

    device: Device
    num_devices: int
    devices_memory_bytes: float
    processors: str
    memory: str
    memory_bytes: float
    disk_bytes: float
    single_bandwidth: float
    host_bandwidth: float
    disk_bandwidth: float
    link_bandwidth: float
    device_memory_bandwidth: Range
    inside_bandwidth: Range
    across_bandwidth: Range
    switch_bandwidth: float
    network_link_bandwidth: float
    network_bits: float


# ZeRO, arXiv:1910.02054, section 10; ZeRO-Offload, arXiv:2101.06840, Table 2; ZeRO-Infinity, arXiv:2104.07857,
# Figure 2(b), which rounds 16 x 32 GB to 0.5 TB.
DGX2 = Host(
    device=DEVICES["v100-32gb"],
    num_devices=16,
    devices_memory_bytes=0.5e12,
    processors="2x Xeon Platinum 8168",
    memory="1.5 TB DDR4-2666",
    memory_bytes=1.5e12,
    disk_bytes=28e12,
    single_bandwidth=12e9,
    host_bandwidth=3e9,
    disk_bandwidth=1.6e9,
    link_bandwidth=32e9,
    device_memory_bandwidth=Range(low=600e9, high=900e9),
    inside_bandwidth=Range(low=150e9, high=300e9),
    across_bandwidth=Range(low=60e9, high=100e9),
    switch_bandwidth=300e9,
    network_link_bandwidth=12.5e9,
    network_bits=800e9,
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal hosts, all of whose devices are used; or one device of one host."""

    host: Host
    num_hosts: int = 1
    num_devices: int = 0

    @property
    def is_single_device(self) -> bool:
        """Whether one device has the host for itself."""
        return self.num_devices == 1

    @property
    def device_memory_bytes(self) -> float:
        """Memory of all devices."""
        if self.is_single_device:
            return self.host.device.memory_bytes
        return self.num_hosts * self.host.devices_memory_bytes

    @property
    def host_memory_bytes(self) -> float:
        """Memory of all hosts."""
        return self.num_hosts * self.host.memory_bytes

    @property
    def disk_bytes(self) -> float:
        """Disks of all hosts."""
        return self.num_hosts * self.host.disk_bytes

    @property
    def device_link(self) -> Range | None:
        """Bytes/s between two devices; None if there is one."""
        if self.is_single_device:
            return None
        return self.host.inside_bandwidth if self.num_hosts == 1 else self.host.across_bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s per device to host memory while all devices read."""
        return self.host.single_bandwidth if self.is_single_device else self.host.host_bandwidth

    @property
    def disk_bandwidth(self) -> float:
        """Bytes/s per device to disk while all devices read."""
        return self.host.single_bandwidth if self.is_single_device else self.host.disk_bandwidth


# Parameters per second that Adam updates on a host with two sockets, for planning: ZeRO-Offload, arXiv:2101.06840,
# Table 4, has 3.3e9 to 4.5e9 on a DGX-2; CMU 11-868, lecture 18, section 4.4, takes 1.5e9.
CPU_ADAM_PARAMS_PER_SECOND = Range(low=1.5e9, high=4e9)
