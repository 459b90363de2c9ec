"""Builds hrdma: the package map, and the one extension module from the C core and its Cython binding.

What is static is in pyproject.toml. The folders ``topo`` and ``qos`` are the packages ``hrdma.topo`` and ``hrdma.qos``; the
list is explicit, since find_packages() would install them at the top level as well.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOMES = {"hrdma": "hrdma", "hrdma.topo": "topo", "hrdma.qos": "qos"}  # longest prefix counts


def packages() -> dict[str, str]:
    """Every package and its folder: those folders below the homes that hold an ``__init__.py``."""
    found = {}
    for name, home in HOMES.items():
        for init in sorted(glob(f"{home}/**/__init__.py", recursive=True)):
            folder = os.path.dirname(init)
            found[name + folder[len(home) :].replace("/", ".")] = folder
    return found


class ParallelBuildExt(build_ext):
    """Compiles the files of the extension side by side, and again only those older than what they are made of."""

    def build_extension(self, ext: Extension) -> None:
        from Cython.Build import cythonize

        compiler = self.compiler
        directives = {"language_level": 3, "binding": True, "embedsignature": True}
        (translated,) = cythonize([ext], include_path=["cython"], compiler_directives=directives)
        changed = max(os.path.getmtime(name) for name in [*ext.depends, "setup.py"])

        def compile_one(source: str) -> list[str]:
            target = compiler.object_filenames([source], output_dir=self.build_temp)[0]
            built = os.path.getmtime(target) if os.path.exists(target) else 0.0
            if not self.force and built > max(changed, os.path.getmtime(source)):
                return [target]
            return compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                debug=self.debug,
                # The binding calls Python and C, which -O3 makes no faster: it would only be compiled for twice as long.
                extra_postargs=ext.extra_compile_args + (["-O1"] if Path(source).stem == "_core" else []),
            )

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = [name for names in pool.map(compile_one, translated.sources) for name in names]
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        compiler.link_shared_object(
            objects, target, libraries=self.get_libraries(ext), extra_postargs=ext.extra_link_args, debug=self.debug,
            build_temp=self.build_temp, target_lang="c",
        )  # fmt: skip

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(name for ext in self.extensions for name in ext.depends)]


def extension() -> Extension:
    headers = sorted(
        name for end in ("h", "def", "inc", "pxd", "pxi") for name in glob(f"cython/**/*.{end}", recursive=True)
    )
    sources = sorted(glob("cython/core/**/*.c", recursive=True) + glob("cython/providers/**/*.c", recursive=True))
    return Extension(
        "hrdma._core",
        ["cython/_core.pyx", *sources],
        include_dirs=["cython/include", "cython"],
        extra_compile_args=["-std=gnu11", "-O3", "-g1", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"],
        extra_link_args=["-pthread"],
        libraries=["dl"],
        depends=headers,
    )


found = packages()
setup(
    packages=list(found),
    package_dir=found,
    package_data={"hrdma": ["py.typed", "*.pyi"]},
    ext_modules=[extension()],
    cmdclass={"build_ext": ParallelBuildExt},
)
