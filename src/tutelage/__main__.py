"""`python -m tutelage` is `tutelage`."""

import sys

from tutelage.cli import main

if __name__ == "__main__":
    sys.exit(main())
