"""Files and settings of other tools, in our terms."""
