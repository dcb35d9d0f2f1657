"""The wheel holds what an installation needs, and nothing else; the editable installation offers the same kernel."""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import json
import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.provisioning import KernelProvisionerFactory

from lemon_kernel import __version__

ROOT = pathlib.Path(__file__).parents[2]
KERNELSPEC = ROOT / "kernelspec" / "lemon"
PACKAGES = {
    "lemon_kernel": ROOT / "lemon_kernel",
    "lemon_provisioner": ROOT / "provisioner" / "lemon_provisioner",
    "lemon_shim": ROOT / "shim" / "lemon_shim",
}
DATA = f"lemon_kernel-{__version__}.data/data/share/jupyter/kernels/lemon"
INFO = f"lemon_kernel-{__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built offline by the back end that is installed."""
    pytest.importorskip("hatchling", reason="building the wheel without the network takes hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
            *("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(ROOT)),
        ],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (file,) = folder.iterdir()
    assert file.name == f"lemon_kernel-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_every_module_is_in_it(wheel: zipfile.ZipFile) -> None:
    """The three packages, each of their modules byte for byte, and nothing at the top level beside them."""
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name: wheel.read(name) for name in wheel.namelist() if name.split("/")[0] in PACKAGES}

    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert {name.split("/")[0] for name in wheel.namelist()} == {*PACKAGES, DATA.split("/")[0], INFO}


def test_types_are_announced(wheel: zipfile.ZipFile) -> None:
    assert "lemon_kernel/py.typed" in wheel.namelist()


def test_kernelspec_is_data(wheel: zipfile.ZipFile) -> None:
    """What a plain `pip install` puts below ``share/jupyter/kernels/lemon`` is the folder of the source tree."""
    expected = {path.name: path.read_bytes() for path in KERNELSPEC.iterdir()}
    found = {name.rpartition("/")[2]: wheel.read(name) for name in wheel.namelist() if name.startswith(DATA)}

    assert found == expected
    assert json.loads(found["kernel.json"])["argv"][0] == "python"


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    """Two commands and the provisioner; each names something that is there."""
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(wheel.read(f"{INFO}/entry_points.txt").decode())

    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {
            "lemon-kernel": "lemon_kernel.cli:main",
            "jupyter-lemon": "lemon_kernel.cli:main",
        },
        "jupyter_client.kernel_provisioners": {"lemon-provisioner": "lemon_provisioner:LemonProvisioner"},
    }
    from lemon_provisioner import LemonProvisioner

    from lemon_kernel.cli import main

    assert callable(main)
    assert isinstance(LemonProvisioner, type)


def test_record_is_right(wheel: zipfile.ZipFile) -> None:
    """Every file is in RECORD with its own hash and size."""
    rows = {row[0]: row[1:] for row in csv.reader(wheel.read(f"{INFO}/RECORD").decode().splitlines())}

    assert rows.keys() == set(wheel.namelist())
    for name, (digest, size) in rows.items():
        if not name.endswith("/RECORD"):
            content = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={expected}", str(len(content)))


def test_metadata(wheel: zipfile.ZipFile) -> None:
    """It says what it needs and under which licence it is; its long description is the README."""
    metadata = wheel.read(f"{INFO}/METADATA").decode()

    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    assert metadata.endswith((ROOT / "README.md").read_text())
    assert f"{INFO}/licenses/LICENSE" in wheel.namelist()


def test_jupyter_finds_the_kernel() -> None:
    """This installation, editable or not, offers the kernelspec as it was packaged."""
    spec = KernelSpecManager().get_kernel_spec("lemon")

    installed = json.loads(pathlib.Path(spec.resource_dir, "kernel.json").read_text())
    assert installed == json.loads((KERNELSPEC / "kernel.json").read_text())


def test_jupyter_finds_the_provisioner() -> None:
    """The provisioner that the kernelspec names is known to jupyter_client."""
    spec = json.loads((KERNELSPEC / "kernel.json").read_text())
    name = spec["metadata"]["kernel_provisioner"]["provisioner_name"]

    assert name in KernelProvisionerFactory.instance().get_provisioner_entries()
