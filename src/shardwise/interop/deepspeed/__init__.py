"""DeepSpeed's configuration files: ``keys`` is the table, ``translate`` applies it."""

from shardwise.interop.deepspeed.translate import deepspeed_keys, native_counterparts, translate

__all__ = ["deepspeed_keys", "native_counterparts", "translate"]
