"""The command ``gxd`` as a program for ``python -c``."""

# A shell that starts the tests in the background has them ignore Ctrl-C, and the command would inherit that.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from gxd_command import main; sys.exit(main())"
)
