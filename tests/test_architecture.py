"""The code is what docs/architecture.md says it is."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    path.stem: path
    for path in sorted((ROOT / "tuner").rglob("*.py"))
    if not path.stem.startswith("__")
}
ROOMS = list(FILES)


def dotted(room: str) -> str:
    return ".".join(FILES[room].relative_to(ROOT).with_suffix("").parts)


@functools.cache
def tree(room: str) -> ast.Module:
    return ast.parse(FILES[room].read_text(encoding="utf-8"))


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that one statement imports; from a folder, it imports rooms."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"line {node.lineno}: relative imports hide the room's name"
    if is_folder(node.module or ""):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [node.module or ""]


def is_folder(module: str) -> bool:
    return module.split(".")[0] == "tuner" and ROOT.joinpath(*module.split(".")).is_dir()


@functools.cache
def imports(room: str, *, at_import: bool) -> set[str]:
    """Return the modules that a room imports: when it is imported itself, or anywhere."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and (is_later or is_for_types):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(modules_of(node))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(room))
    return found


def rooms_used(room: str) -> set[str]:
    return {m.rpartition(".")[2] for m in imports(room, at_import=False) if m.startswith("tuner.")}


@functools.cache
def table() -> dict[str, set[str]]:
    """Read `| room | does | may import |` of the document.

    The heading above a table names the rooms' folder, which is checked here.
    """
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The rooms", 1)[1].split("\n## ", 1)[0]
    allowed: dict[str, set[str]] = {}
    folder = ""
    for line in section.splitlines():
        if line.startswith("### "):
            folder = line.split("`")[1]
        if not line.startswith("| `"):
            continue
        names, _, may_import = line.strip("|").split("|")
        words = {word.strip() for word in may_import.split(",") if word.strip()}
        for name in re.findall(r"`(\w+)`", names):
            assert f"{FILES[name].parent.relative_to(ROOT)}/" == folder, name
            allowed[name] = words
    return allowed


def test_the_table_lists_every_room_and_no_other():
    assert set(table()) == set(ROOMS)


def test_the_tables_of_shared_device_code_list_every_file_once():
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    section = text.split("## Shared device code", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"^\| `([\w.]+)` \| \S", section, re.MULTILINE)
    assert sorted(named) == sorted(p.name for p in (ROOT / "templates" / "_lib").iterdir())


def test_rooms_import_only_what_the_table_allows():
    allowed = table()
    assert {room: more for room in ROOMS if (more := rooms_used(room) - allowed[room])} == {}


def test_the_table_allows_no_import_that_a_room_does_without():
    allowed = table()
    assert {room: less for room in ROOMS if (less := allowed[room] - rooms_used(room))} == {}


@pytest.mark.parametrize(
    ("heading", "parent"),
    [
        ("| folder | imports of other folders |", ROOT / "tuner"),
        ("| folder in capture | imports of others there |", ROOT / "tuner" / "capture"),
        ("| folder in check | imports of others there |", ROOT / "tuner" / "check"),
    ],
)
def test_the_tables_of_folders_say_what_each_imports_of_others(heading, parent):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = text.split(heading, 1)[1].split("\n\n", 1)[0]
    said = {}
    for name, imported in re.findall(r"^\| (\w+) \|(.*)\|$", rows, re.MULTILINE):
        said[name] = {word.strip() for word in imported.split(",") if word.strip()}
    assert set(said) == {path.parent.name for path in parent.glob("*/__init__.py")}
    inside = {room: FILES[room] for room in ROOMS if parent in FILES[room].parent.parents}
    folders = {room: path.relative_to(parent).parts[0] for room, path in inside.items()}
    found: dict[str, set[str]] = {name: set() for name in said}
    for room, folder in folders.items():
        found[folder] |= {folders[used] for used in rooms_used(room) & set(folders)} - {folder}
    assert found == said


def test_no_room_is_above_400_lines():
    long = {room: n for room in ROOMS if (n := len(FILES[room].read_text().splitlines())) > 400}
    assert not long


def test_the_table_names_only_rooms_and_only_upwards():
    above: set[str] = set()
    for room, allowed in table().items():
        assert allowed <= set(table()), room
        assert allowed <= above, f"{room} imports what stands below it: {allowed - above}"
        above.add(room)


def test_no_import_goes_in_a_circle():
    sorter = graphlib.TopologicalSorter({room: rooms_used(room) for room in ROOMS})
    list(sorter.static_order())  # CycleError names the circle


def doors() -> dict[str, set[str]]:
    """Read "Third parties stay behind doors: `a` in `x` and `y`; `b` and `c` in `z`. ..."."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sentence = text.split("Third parties stay behind doors:", 1)[1].split(".", 1)[0]
    found: dict[str, set[str]] = {}
    for part in sentence.split(";"):
        packages, rooms = (set(re.findall(r"`(\w+)`", half)) for half in re.split(r"\sin\s", part))
        found.update(dict.fromkeys(packages, rooms))
    return found


def test_the_document_names_the_doors():
    assert {"jinja2", "optuna", "plotly"} <= set(doors())
    assert set().union(*doors().values()) <= set(ROOMS)


def packages_of(room: str, *, at_import: bool) -> set[str]:
    return {module.split(".")[0] for module in imports(room, at_import=at_import)}


def test_third_parties_stay_behind_their_doors():
    outside = [
        f"{package} in {room}"
        for package, rooms in doors().items()
        for room in ROOMS
        if package in packages_of(room, at_import=False) and room not in rooms
    ]
    assert outside == []


def test_torch_and_its_like_are_imported_inside_functions_only():
    large = {"torch", "triton", "plotly", "scipy"}
    found = {room: packages_of(room, at_import=True) & large for room in ROOMS}
    assert {room: packages for room, packages in found.items() if packages} == {}


def test_importing_all_rooms_does_not_import_torch():
    code = (
        "import importlib, sys\n"
        "for room in sys.argv[1:]:\n"
        "    importlib.import_module(room)\n"
        "    assert 'torch' not in sys.modules, room\n"
    )
    asked = [sys.executable, "-W", "ignore", "-c", code, *map(dotted, ROOMS)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_room_knows_an_operator_by_name():
    families = [path.parent.name for path in (ROOT / "templates").glob("*/op.yaml")]
    assert families
    texts = {room: FILES[room].read_text(encoding="utf-8") for room in ROOMS}
    known = [f"{name} in {room}" for room in ROOMS for name in families if name in texts[room]]
    assert known == []


def test_what_rooms_offer_is_sorted_complete_and_there():
    faults = []
    for room in ROOMS:
        module = importlib.import_module(dotted(room))
        offered = list(module.__all__)
        # As ruff sorts them: constants, then classes, then the rest.
        kinds = [0 if n.isupper() else 1 if n[:1].isupper() else 2 for n in offered]
        pairs = list(zip(kinds, offered, strict=True))
        faults += [f"{room} is not sorted"] if pairs != sorted(pairs) else []
        faults += [f"{room} has no {name}" for name in offered if not hasattr(module, name)]
        faults += [f"{room} offers {name}" for name in offered if name.startswith("_")]
    assert faults == []


def test_what_one_room_takes_from_another_is_offered_there():
    hidden = []
    for room in ROOMS:
        for node in ast.walk(tree(room)):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("tuner.") and not is_folder(module):
                offered = importlib.import_module(node.module).__all__
                hidden += [
                    f"{room}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in offered
                ]
    assert hidden == []


def test_rooms_say_what_they_are_for():
    texts = {room: (ast.get_docstring(tree(room)) or "").split("\n\n")[0] for room in ROOMS}
    sentence = re.compile(r"[A-Z`].*[.:]$", re.DOTALL)
    assert [room for room, text in texts.items() if not sentence.match(text)] == []


def test_every_failure_is_drawn_in_the_tree_of_errors():
    errors = importlib.import_module("tuner.errors")
    drawn = set(re.findall(r"\w+Error\b", errors.__doc__))
    named = {name for name in errors.__all__ if name.endswith("Error")}
    assert named <= drawn
    exits = {
        "InputError": 2, "NothingCorrectError": 1, "NothingToGainError": 0, "MachineError": 3,
    }  # fmt: skip
    for name, code in exits.items():
        assert getattr(errors, name).exit_code == code
    for name in named - {"TunerError"}:
        assert any(issubclass(getattr(errors, name), getattr(errors, top)) for top in exits)


def anchors_of(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", t.lower()).replace(" ", "-") for t in titles}


def test_links_lead_somewhere():
    lost = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8"))
        for target, anchor in links:
            there = page.parent / target if target else page
            is_web = target.startswith("http")
            if not is_web and not (there.exists() and (not anchor or anchor in anchors_of(there))):
                lost.append(f"{page.name}: {target}#{anchor}")
    assert lost == []


def test_what_a_brief_run_leaves_out_are_tests():
    lines = (ROOT / "tests/brief.txt").read_text().splitlines()
    left = [line.split(maxsplit=2) for line in lines if not line.startswith("#")]
    names = [name for name, *_ in left]
    assert names == sorted(set(names)), "sorted, once each"
    unsaid = [name for name, count, *why in left if count == "0" and not why]
    assert unsaid == [], "what is left out whole says which test shows the same"
    for name in names:
        file, _, test = name.partition("::")
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), name
