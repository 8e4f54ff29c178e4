"""``python -m pdl_stress`` is ``pdl-stress``."""

from .cli import main

if __name__ == "__main__":
    main()
