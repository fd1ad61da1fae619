"""Training without memory and without a network, to count what it would need: ``dry_run``."""

from shardwise.dryrun.live import Event, Peak
from shardwise.dryrun.run import DryRun, dry_run

__all__ = ["DryRun", "Event", "Peak", "dry_run"]
