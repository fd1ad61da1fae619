"""``python -m shardwise.cli``: the same program, where its script is not on the path."""

from shardwise.cli.main import main

main()
