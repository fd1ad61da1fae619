"""The doors to torch.distributed.checkpoint: convert to and from its format, or let it read and write ours."""

from shardwise.checkpoint.doors.dcp_in import import_dcp
from shardwise.checkpoint.doors.dcp_out import export_dcp
from shardwise.checkpoint.doors.dcp_reader import ShardwiseStorageReader
from shardwise.checkpoint.doors.dcp_writer import ShardwiseStorageWriter

__all__ = ["ShardwiseStorageReader", "ShardwiseStorageWriter", "export_dcp", "import_dcp"]
