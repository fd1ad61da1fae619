"""Where initial values come from: a recorded construction, or weights of a file.

``recorder.py`` writes the operations of a constructor on a tape (``tape.py``), with what ``operations.py`` knows of
them, and gives random states names (``states.py``); ``replay.py`` computes one tensor from the tape; ``recipe.py`` and
``weights.py`` are what users hold. ``delivery.py`` is what ``api.py`` sees of both. See
docs/design/0010-deferred-construction.md.
"""
