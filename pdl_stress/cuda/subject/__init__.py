"""Captured kernels of which only the memory they touch is known: what each reads and writes, and whether it waits.

``capturing`` captures a callable once; ``memory`` knows the allocator's blocks and moves their content; ``variants``
makes twins of the captured graph; ``observe`` finds who writes and reads what; ``probe`` measures each kernel behind an
early-release producer; ``checker`` puts it together.
"""
