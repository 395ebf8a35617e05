"""The source distribution is complete: a wheel builds from it alone, in an empty folder, and imports."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, cwd: Path, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def test_a_wheel_builds_from_the_sdist_alone(tmp_path):
    run(
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "-e",
        tmp_path,
        "sdist",
        "-d",
        tmp_path / "sdist",
        cwd=ROOT,
    )
    (sdist,) = (tmp_path / "sdist").iterdir()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert sources <= names
    assert {"CMakeLists.txt", "LICENSE", "setup.py", "pyproject.toml", "paged_kv/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc", "_build.json"))]
    assert not {name.partition("/")[0] for name in names} & {"build", "dist", "tests", "bench", ".venv"}

    # Without optimisation, because this asks whether everything is there and not how fast it is.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel_options = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", tmp_path / "wheel"]
    run(*pip, "wheel", *wheel_options, sdist, cwd=tmp_path, CMAKE_ARGS="-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    (wheel,) = (tmp_path / "wheel").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("paged_kv/py.typed", "paged_kv/_build.json"):
        assert name in names

    run(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    code = "import paged_kv; print(paged_kv.__file__)"
    file = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).strip()
    assert Path(file).is_relative_to(tmp_path / "site")
