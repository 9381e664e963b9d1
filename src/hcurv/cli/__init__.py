"""The command line, ``hcurv COMMAND``. Nothing here imports torch before a command needs it."""
