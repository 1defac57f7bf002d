import sys

from rtk.cli import main

sys.exit(main())
