"""Processes: join the group a launcher prepared, and start one."""
