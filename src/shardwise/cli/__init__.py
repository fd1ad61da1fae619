"""The command line; each command calls one public function."""
