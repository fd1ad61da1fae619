"""Which settings fit a memory, found by dry runs of what ``shardwise train`` would do.

``case``     one combination of settings, and what it needs
``subject``  the model and the settings around it; runs a case without memory
``search``   the largest or the fewest that fits
``choice``   all cases of a question, and which of them to take
``states``   a number of parameters instead of a model: states alone
``tables``   what is printed

Everything here is planned; nothing is measured.
"""
