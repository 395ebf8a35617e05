"""The package's face: what it exports, what it was built with, and how it fails where that does not fit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paged_kv
from paged_kv import _C
from paged_kv._optional import optional_import
from paged_kv.build_info import load_native

PACKAGE = Path(paged_kv.__file__).parent


def run_python(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a fresh interpreter that finds packages in `cwd` first."""
    env = {**os.environ, "PYTHONPATH": str(cwd), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return run_python(["-c", code], cwd, **environment)


def import_error(cwd: Path, **environment: str) -> str:
    """Imports paged_kv afresh, in `cwd`; returns the message of the one ImportError that must end it."""
    child = python("import paged_kv", cwd, **environment)
    assert child.returncode == 1
    assert child.stderr.count("Traceback") == 1
    kind, _, message = child.stderr.strip().splitlines()[-1].partition(": ")
    assert kind == "ImportError"
    return message


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A copy of the package, free to be broken, in a folder that is not the source folder."""
    return shutil.copytree(PACKAGE, tmp_path / "paged_kv", ignore=shutil.ignore_patterns("__pycache__"))


def test_all_is_sorted_and_complete():
    names = paged_kv.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in names:
        assert getattr(paged_kv, name) is not None


def test_import_needs_no_optional_package():
    loaded = "import sys, paged_kv; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    modules = python(loaded, PACKAGE.parent).stdout.split()
    assert {"paged_kv", "torch"} <= set(modules)
    assert not {"transformers", "accelerate", "gguf", "tokenizers", "matplotlib"} & set(modules)


def test_types_are_published():
    assert (PACKAGE / "py.typed").exists()


def test_build_info_tells_versions_and_instruction_sets():
    info = paged_kv.build_info()
    assert info.paged_kv == paged_kv.__version__
    assert info.torch == torch.__version__
    assert info.python == ".".join(map(str, sys.version_info[:3]))
    assert info.isa in info.isas_supported
    assert info.isas_supported == tuple(isa for isa in info.isas_built if isa in info.isas_supported)
    assert "default" in info.isas_supported
    assert bool(info.cuda_archs) != bool(info.cuda_reason)
    text = str(info)
    for part in (info.torch, info.compiler, *info.isas_built, *info.cuda_archs, info.cuda_reason):
        assert part in text


def test_set_isa_chooses_each_supported_level():
    before = paged_kv.build_info().isa
    try:
        for isa in paged_kv.build_info().isas_supported:
            paged_kv.set_isa(isa)
            assert paged_kv.build_info().isa == isa
    finally:
        paged_kv.set_isa(before)


def test_set_isa_refuses_what_is_not_there():
    before = paged_kv.build_info()
    with pytest.raises(ValueError, match=r"name: expected .*default.*, got 'sse9'"):
        paged_kv.set_isa("sse9")
    for isa in set(before.isas_built) - set(before.isas_supported):
        with pytest.raises(ValueError, match=f"got '{isa}'"):
            paged_kv.set_isa(isa)
    with pytest.raises(TypeError, match=r"^name: expected the name of an instruction set, got None$"):
        paged_kv.set_isa(None)
    assert paged_kv.build_info() == before


@pytest.mark.parametrize("isa", _C.isas_supported())
def test_environment_forces_an_isa(isa):
    child = python("import paged_kv; print(paged_kv.build_info().isa)", PACKAGE.parent, PAGED_KV_ISA=isa)
    assert child.stdout.strip() == isa, child.stderr


def test_environment_with_a_wrong_isa_is_an_import_error():
    message = import_error(PACKAGE.parent, PAGED_KV_ISA="sse9")
    assert message.startswith("PAGED_KV_ISA: expected")
    assert message.endswith(f"({', '.join(_C.isas_supported())}), got 'sse9'")


SCRIPT = "import sys; from paged_kv.cli import main; sys.exit(main())"  # as pip writes it


@pytest.mark.parametrize(
    ("command", "isa", "sentence"),
    [
        (["-X", "utf8", "-m", "paged_kv", "info"], "sse9", "PAGED_KV_ISA: expected"),
        (["-mpaged_kv", "info"], "", "paged_kv._C is not built"),
        (["paged-kv"], "", "paged_kv._C is not built"),
    ],
)
def test_of_what_keeps_it_from_loading_the_command_tells_only_the_sentence(
    package_copy, command, isa, sentence
):
    if not isa:
        (package_copy / "_build.json").unlink()
    (package_copy.parent / "paged-kv").write_text(SCRIPT)
    child = run_python(command, package_copy.parent, PAGED_KV_ISA=isa)
    assert (child.returncode, child.stdout, child.stderr.count("\n")) == (2, "", 1)
    assert child.stderr.startswith(f"paged-kv: {sentence}")


def test_a_script_with_the_arguments_of_the_command_gets_the_error(package_copy):
    (package_copy.parent / "another").write_text(SCRIPT)
    child = run_python(["another", "-m", "paged_kv"], package_copy.parent, PAGED_KV_ISA="sse9")
    assert child.returncode == 1
    assert "\nImportError: PAGED_KV_ISA: expected" in child.stderr


def test_another_torch_is_an_import_error_before_the_library_is_loaded(package_copy):
    facts = json.loads((package_copy / "_build.json").read_text())
    (package_copy / "_build.json").write_text(json.dumps({**facts, "torch": "2.0.1+cu118"}))
    for library in package_copy.glob("_C*.so"):
        library.write_bytes(b"loading this would fail with another message")
    message = import_error(package_copy.parent)
    assert message.startswith(f"paged_kv was built against torch 2.0.1+cu118, not torch {torch.__version__};")
    assert "pip install --no-build-isolation" in message


@pytest.mark.parametrize("missing", ["_C*.so", "_manager*.so", "_build.json"])
def test_a_missing_build_is_an_import_error(package_copy, missing):
    for file in package_copy.glob(missing):
        file.unlink()
    message = import_error(package_copy.parent)
    assert message.startswith("paged_kv._C is not built")
    assert "pip install --no-build-isolation" in message


def test_in_a_source_folder_the_command_names_it(package_copy):
    (package_copy / "_build.json").unlink()
    (package_copy.parent / "setup.py").touch()
    with pytest.raises(ImportError, match=f"run `pip install --no-build-isolation -e {package_copy.parent}`"):
        load_native(package_copy)


def test_a_missing_optional_package_names_the_extra():
    with pytest.raises(ImportError, match=r"needs no_such_package: run `pip install 'paged_kv\[plot\]'`"):
        optional_import("no_such_package.pyplot", "plot")
    assert optional_import("json", "plot") is json


def test_a_broken_optional_package_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        optional_import("broken_package", "plot")
