#!/bin/sh
# Take out of the installed packages what no node uses: tests, symbols for debuggers, and the compiled
# bytecode of two packages that only --compile imports.
set -eu
cd /opt/murmur/lib/python3*/site-packages

for package in scipy sympy networkx pandas pyarrow numba sklearn nltk; do # not numpy: it imports a file of its tests
    [ ! -d "$package" ] || find "$package" -type d -name tests -prune -exec rm -rf {} +
done
for package in sympy networkx; do
    [ ! -d "$package" ] || find "$package" -type d -name __pycache__ -prune -exec rm -rf {} +
done

if command -v strip >/dev/null; then
    for package in llvmlite zstandard uvloop tokenizers yaml; do
        [ ! -d "$package" ] || find "$package" -type f -name '*.so*' -exec strip --strip-unneeded {} +
    done
fi
