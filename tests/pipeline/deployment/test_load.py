"""Deployment files: whatever is wrong with one is said with file, line, key, value and remedy (field report B49)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.codecs.errors import ConfigError
from tensorferry.pipeline.deployment import yaml_file
from tensorferry.pipeline.deployment.document import Document
from tensorferry.pipeline.deployment.load import load, require_available, resolved
from tensorferry.pipeline.deployment.spec import (
    MIB,
    Deployment,
    Spec,
    device_of,
    encoder_pool_nbytes,
    mail_of,
    tokenizer_pool_nbytes,
)

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "ferry.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def refusal(write):
    """The ConfigError that loading this text raises; its file has been checked."""

    def refusal(text: str | bytes, *settings: str, **hooks: Any) -> ConfigError:
        path = write(text)
        with pytest.raises(ConfigError) as caught:
            load(path, settings, **hooks)
        assert caught.value.file in (str(path), "--set")
        assert str(caught.value).startswith(caught.value.file)
        assert "\n" not in str(caught.value)
        return caught.value

    return refusal


class Switches(Spec, frozen=True):
    on_by_default: bool = True
    rate: float = 1.0
    names: tuple[str, ...] = ()
    label: str = ""


def switches(path: Path, *settings: str) -> Switches:
    return yaml_file.apply_overrides(yaml_file.read(path), settings).decode(Switches)


# --- B49, row by row ----------------------------------------------------------------------------------------


def test_false_in_the_file_switches_off_what_is_on_by_default(write):
    assert switches(write("on_by_default: false")).on_by_default is False
    assert switches(write("rate: 2")).on_by_default is True


@pytest.mark.parametrize("in_file", ["true", "false"])
@pytest.mark.parametrize("on_command_line", ["true", "false"])
def test_the_command_line_beats_the_file(write, in_file, on_command_line):
    path = write(f"on_by_default: {in_file}")
    assert switches(path, f"on_by_default={on_command_line}").on_by_default is (on_command_line == "true")


def test_a_list_stays_a_list_and_is_not_joined(write):
    assert switches(write("names: [a, b]")).names == ("a", "b")
    assert switches(write("rate: 1"), "names=[a, b]").names == ("a", "b")


@pytest.mark.parametrize(
    ("spelling", "means"),
    [
        ("0123", "0123"),
        ("12:30:00", "12:30:00"),
        ("NO", "NO"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("2024-01-31", "2024-01-31"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("=", "="),
        ("tRUE", "tRUE"),
        ('"true"', "true"),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("5\u0661", "5\u0661"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("9223372036854775807", 2**63 - 1),
        ("!!int 5", 5),
        ("1e3", 1000.0),
        ("1E-3", 0.001),
        ("1.5", 1.5),
        (".5", 0.5),
        ("2.", 2.0),
        ("0.10", 0.1),
    ],
)
def test_plain_text_means_what_it_says(write, spelling, means):
    value = yaml_file.read(write(f"key: {spelling}\n")).data["key"]
    assert value == means
    assert type(value) is type(means)


@pytest.mark.parametrize(
    ("spelling", "problem"),
    [
        ("0123", "expected a whole number, got 0123 (text); write plain decimal digits"),
        ("12:30:00", "expected a whole number, got 12:30:00 (text); write plain decimal digits"),
        ("NO", "expected a whole number, got NO (text)"),
        ("1e3", "expected a whole number, got 1e3; write 1000"),
        ("1.5", "expected a whole number, got 1.5; leave out the fraction"),
        ("true", "expected a whole number, got true"),
        ('"512"', 'expected a whole number, got "512" (text); write plain decimal digits, without quotes'),
        ("512MiB", "expected a whole number, got 512MiB (text)"),
        ("", "expected a whole number, got nothing; give it a value or remove the key"),
        ("~", "expected a whole number, got ~ (null)"),
        ("[512]", "expected a whole number, got a list"),
        ("{mb: 512}", "expected a whole number, got a section of keys"),
        ("0", "expected a whole number >= 1, got 0"),
        ("-5", "expected a whole number >= 1, got -5"),
        ("1048576", "expected a whole number <= 1048575, got 1048576"),
        ("9223372036854775808", "9223372036854775808 is beyond 64 bits"),
        ("9" * 5000, "9" * 80 + "... is beyond 64 bits"),
        ("1e999", "1e999 is beyond what a number can hold"),
        ("!!int 0123", "0123 is not what its tag !!int says"),
        ("!!python/object:os.system x", "the tag !!python/object:os.system is not supported"),
        ("!env HOME", "the tag !env is not supported"),
        ("!!binary aGk=", "the tag !!binary is not supported"),
        ("!!timestamp 2024-01-31", "the tag !!timestamp is not supported"),
        ("!!str [1]", "the tag !!str is not supported here"),
        ("!!set {a}", "the tag !!set is not supported"),
        (r'"\ud800"', r"\ud800 has half a surrogate pair"),
    ],
)
def test_a_wrong_value_is_named_with_file_line_and_key(refusal, spelling, problem):
    error = refusal(f"# a comment\nname: a\npool:\n  slots: 8\n  budget_mb: {spelling}\n")
    assert (error.line, error.key) == (5, "pool.budget_mb")
    assert error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("text", "line", "key", "problem"),
    [
        ("name: a\nrate: NO\n", 2, "rate", "unknown key, given NO (text); known here: name, "),
        ("name: a\nnodez: 2\n", 2, "nodez", "unknown key, given 2; did you mean `nodes`?"),
        ("name: a\n\npool: {budget_mb: 4, slotz: 2}", 3, "pool.slotz", "unknown key, given 2; did you mean `slots`?"),
        (
            "slots: 4\nname: a\n",
            1,
            "slots",
            "unknown key, given 4; did you mean `pool.slots` or `embeddings_pool.slots`?",
        ),
        (
            "name: a\npool:\n  budget_mb: 1\n  slots: 2\n  budget_mb: 2\n",
            5,
            "pool.budget_mb",
            "given twice; first on line 3",
        ),
        ("name: a\nname: a\n", 2, "name", "given twice; first on line 1"),
        ("name: a\npool: {slots: 2}\npool: {budget_mb: 2}\n", 3, "pool", "given twice; first on line 2"),
        ("name: a\n1: b\n", 2, "", 'a key must be text, not 1; write "1"'),
        ("name: a\npool:\n  true: b\n", 3, "pool", 'a key must be text, not true; write "true"'),
        ("name: a\n~: b\n", 2, "", "a key must be text"),
        ("name: a\n? [x]\n: b\n", 2, "", "a key must be text, not a list, a mapping or nothing"),
        ("name: a\n<<: {nodes: 2}\n", 2, "<<", "unknown key"),
        ("name: &n a\nfrontend: *n\n", 2, "frontend", "the alias *n is not supported; write the value out"),
        ("name: a\nmodel: &m\n  options: *m\n", 3, "model.options", "the alias *m is not supported"),
        ("name: a\nmodel: {*n : 1}\n", 2, "model", "a key must be text"),
        ("name: a\npool:\n", 2, "pool", "expected a section of keys, got nothing"),
        ("name: a\npool: 5\n", 2, "pool", "expected a section of keys, got 5"),
        ("name: a\npool:\n  - slots\n", 2, "pool", "expected a section of keys, got a list"),
        ("nodes: 1\n", None, "name", "missing; add `name: ...`"),
        (
            "name: a\ntransport: SHM\n",
            2,
            "transport",
            "expected one of auto, cpu, shm, cuda_ipc, cuda_vmm, got SHM (text)",
        ),
        (
            "name: a\ntransport: cuda-ipc\n",
            2,
            "transport",
            "expected one of auto, cpu, shm, cuda_ipc, cuda_vmm, got cuda-ipc",
        ),
        ("name: a\ntransport: 5\n", 2, "transport", "expected one of auto, cpu, shm, cuda_ipc, cuda_vmm, got 5"),
        ("name: 0\n", 1, "name", "expected text, got 0; put it in quotes"),
        (
            "name: a\nmodel:\n  options:\n    width: 3\n    depth: [1]\n",
            5,
            "model.options.depth",
            "expected true or false or a ",
        ),
        ("name: a\ntimeouts: {drain_s: 0}\n", 2, "timeouts.drain_s", "expected a number > 0.0, got 0"),
        ("name: a\ntimeouts: {drain_s: 1e9}\n", 2, "timeouts.drain_s", "expected a number <= 1000000.0, got 1e9"),
        ("name: a\ntimeouts: {drain_s: .inf}\n", 2, "timeouts.drain_s", "expected a number, got .inf (text)"),
        ("name: a\n" + '"b\\nc": 1\n', 2, r"b\nc", "unknown key"),
    ],
)
def test_a_wrong_shape_is_named_with_file_line_and_key(refusal, text, line, key, problem):
    error = refusal(text)
    assert (error.line, error.key) == (line, key)
    assert error.problem.startswith(problem)


def test_a_near_miss_is_answered_with_the_right_choice(refusal):
    assert refusal("name: a\ntransport: cuda-ipc\n").problem.endswith("; did you mean cuda_ipc?")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", None, "is empty"),
        ("# only a comment\n", None, "is empty"),
        ("---\n...\n", None, "is empty"),
        ("\n- name\n", 2, "is not a mapping"),
        ("just text", 1, "is not a mapping"),
        ("name: a\n---\nname: b\n", 2, "not YAML: expected a single document in the stream but found another document"),
        ("name: a\npool:\n\tslots: 4\n", 3, "not YAML: while scanning"),
        ("name: a\npool: {slots: 4\nnodes: 1\n", 3, "not YAML: while parsing a flow mapping"),
        ("name: a\npool: [1, 2\n", 3, "not YAML: while parsing a flow sequence"),
        ("name: 'a\nnodes: 1\n", 3, "not YAML: while scanning a quoted scalar"),
        ("name: a: b\n", 1, "not YAML: mapping values are not allowed here: name: a: b"),
        ("name: a\n  nodes: 2\n", 2, "not YAML: mapping values are not allowed here"),
        ("name: *b\n", 1, "the alias *b is not supported"),
        ("name: a\nnodes: %5\n", 2, "not YAML: while scanning for the next token"),
        ('name: a\nfrontend: "\\UFFFFFFFF"\n', 2, "not YAML: an escape beyond Unicode"),
        ('name: a\nfrontend: "\\U00110000"\n', 2, "not YAML: an escape beyond Unicode"),
        ("name: a\nnodes: \x00\n", 2, "not YAML: the character U+0000 is not allowed"),
        ("name: a\nnodes: " + "[" * 200, 2, "not YAML: nested deeper than 16 levels"),
        ("name: a\nnodes: " + "{a: " * 200, 2, "not YAML: nested deeper than 16 levels"),
        (b"name: a\nfrontend: caf\xe9\n", 2, "byte 0xe9 is not UTF-8"),
        ("name: a\n".encode("utf-16"), 1, "byte 0xff is not UTF-8"),
        (b"#" * (1 << 18) + b"\nname: a\n", None, "is larger than 262144 bytes"),
    ],
)
def test_what_is_not_a_yaml_mapping_is_named_with_file_and_line(refusal, text, line, problem):
    error = refusal(text)
    assert error.line == line
    assert error.problem.startswith(problem)


def test_tabs_are_answered_with_spaces(refusal):
    assert refusal("name: a\npool:\n\tslots: 4\n").problem.endswith("; indent with spaces: slots: 4")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, reason in [(tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")]:
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value) == f"{path}: cannot be read: {reason}"


def test_a_byte_order_mark_and_crlf_are_fine(write, refusal):
    assert load(write(b"\xef\xbb\xbfname: a\r\nnodes: 1\r\n")) == Deployment(name="a")
    assert refusal(b"\xef\xbb\xbfname: a\r\nnodes: x\r\n").line == 2


@pytest.mark.slow
@given(
    st.binary(max_size=200) | st.text(st.sampled_from("ab:-?[]{}&*!|>'\"%@#,~01. \n\t\\"), max_size=60).map(str.encode)
)
def test_any_bytes_are_a_document_or_a_config_error(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(raw)
    problem = None
    try:
        load(path)
    except ConfigError as refusal:
        problem = str(refusal)
    assert problem is None or problem.isprintable()


# --- settings over the file ---------------------------------------------------------------------------------


def test_settings_replace_values_sections_and_defaults(write):
    path = write("name: a\npool: {budget_mb: 4, slots: 8}\n")
    deployment = load(path, ["pool.budget_mb=512", "telemetry.log_level=debug", "model.options.width=64", "name='0'"])
    assert (deployment.pool.budget_mb, deployment.pool.slots) == (512, 8)
    assert deployment.telemetry.log_level == "debug"
    assert deployment.model.options == {"width": 64}
    assert deployment.name == "0"
    assert load(path, ["pool={slots: 3}", "pool.budget_mb=2"]).pool == msgspec.structs.replace(
        Deployment(name="a").pool, slots=3, budget_mb=2
    )


def test_settings_leave_the_document_they_are_laid_over_unchanged(write):
    document = yaml_file.read(write("name: a\npool: {slots: 8}\n"))
    yaml_file.apply_overrides(document, ["pool.slots=9", "pool.budget_mb=1"])
    assert document.data == {"name": "a", "pool": {"slots": 8}}


@pytest.mark.parametrize(
    ("settings", "key", "problem"),
    [
        (["pool.bugdet_mb=5"], "pool.bugdet_mb", "unknown key, given 5; did you mean `budget_mb`?"),
        (["pol.budget_mb=5"], "pol", "unknown key, given a section of keys; did you mean `pool`?"),
        (["pool.budget_mb=0123"], "pool.budget_mb", "expected a whole number, got 0123 (text)"),
        (["pool.budget_mb="], "pool.budget_mb", "expected a whole number, got nothing"),
        (["pool.budget_mb=NO"], "pool.budget_mb", "expected a whole number, got NO (text)"),
        (["pool.slots=1", "pool.slots=2"], "pool.slots", "given twice, the second time as 2"),
        (["pool.slots=1", "pool={budget_mb: 2}"], "pool", "given twice"),
        (["pool={slots: 1}", "pool.slots=2"], "pool.slots", "given twice"),
        (["pool={slots: 1, slots: 2}"], "pool.slots", "given twice; remove one"),
        (["pool=5"], "pool", "expected a section of keys, got 5"),
        (["name.first=b"], "name.first", "name is not a section of keys"),
        (["pool.budget_mb"], "pool.budget_mb", "write it as KEY=VALUE"),
        (["=5"], "=5", "write it as KEY=VALUE"),
        (["pool..slots=5"], "pool..slots=5", "write it as KEY=VALUE"),
        (["name=a: b: c"], "name", "not YAML"),
        (["name=[a"], "name", "not YAML"),
        (["name=--- a\n--- b"], "name", "not YAML"),
        (["name=\udce9"], "name", "not YAML: the character U+DCE9 is not allowed"),
        (["limits.item_mb=600"], "limits.item_mb", "600 MiB is more than a whole request may have"),
        (["limits.request_mb=16"], "limits.request_mb", "64 MiB is more than a whole request may have"),
    ],
)
def test_a_wrong_setting_is_named(refusal, settings, key, problem):
    error = refusal("name: a\npool: {budget_mb: 4}\nlimits: {item_mb: 64}\n", *settings)
    assert (error.file, error.line, error.key) == ("--set", None, key)
    assert error.problem.startswith(problem)


def test_a_section_given_by_a_setting_replaces_the_files(refusal):
    text = "name: a\nembeddings_pool: {budget_mb: 300}\nencoder: {ranks: 300}\n"
    error = refusal(text, "embeddings_pool={slots: 8}")
    assert (error.line, error.key) == (3, "encoder.ranks")


# --- what no single value can tell --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "key", "parts"),
    [
        ("scheduler:\n  tp_size: 4\n  attention_tp_size: 3\n", 4, "scheduler.attention_tp_size", ["3 does not", "4"]),
        ("scheduler: {attention_tp_size: 2}\n", 2, "scheduler.attention_tp_size", ["scheduler.tp_size, 1"]),
        ("pool: {budget_mb: 7}\ntokenizer: {workers: 8}\n", 2, "pool.budget_mb", ["7 MiB over 8 tokenizer", "to 8"]),
        ("encoder: {ranks: 257}\n", 2, "encoder.ranks", ["256 MiB over 257 encoder.ranks"]),
        ("limits: {item_mb: 600}\n", 2, "limits.item_mb", ["600 MiB", "512"]),
        ("limits:\n  request_mb: 63\n", 3, "limits.request_mb", ["64 MiB", "63"]),
        ("timeouts: {heartbeat_s: 5}\n", 2, "timeouts.heartbeat_s", ["5.0 s is no longer than", "several heartbeats"]),
        ("timeouts: {quarantine_s: 0.5}\n", 2, "timeouts.quarantine_s", ["0.5 s", "1.0 s"]),
        ("transport: cuda_ipc\nnodes: 2\n", 2, "transport", ["cuda_ipc works within one node", "2", "cuda_vmm"]),
        ("transport: shm\nnodes: 2\n", 2, "transport", ["shm works within one node"]),
        ("pp_size: 2\ntransport: cuda_vmm\n", 3, "transport", ["pp_size 1, not 2", "cuda_ipc"]),
        ("transport: cuda_ipc\npool: {acknowledge: messages}\n", 3, "pool.acknowledge",
         ["beside transport: cuda_ipc", "only cuda_vmm"]),
        ("pool: {acknowledge: messages}\n", 2, "pool.acknowledge", ["transport: auto", "set transport: cuda_vmm"]),
        ("telemetry: {prometheus_port: 64990}\nencoder: {ranks: 600}\nembeddings_pool: {budget_mb: 600}\n", 2,
         "telemetry.prometheus_port", ["602 processes", "64934 or less"]),
    ],
)  # fmt: skip
def test_contradictions_are_named(refusal, text, line, key, parts):
    error = refusal("name: a\n" + text)
    assert (error.line, error.key) == (line, key)
    for part in parts:
        assert part in error.problem


@pytest.mark.parametrize(
    "text",
    [
        "transport: cuda_vmm\nnodes: 2\n",
        "transport: cpu\nnodes: 2\n",
        "transport: auto\nnodes: 2\npp_size: 2\n",
        "transport: cuda_ipc\npp_size: 2\n",
        "frontend: rust\ntransport: cuda_vmm\n",
        "transport: cuda_vmm\npool: {acknowledge: messages}\n",
        "transport: cpu\ntokenizer: {workers: 8}\npool: {budget_mb: 1}\n",
        "scheduler: {tp_size: 8, attention_tp_size: 8}\n",
        "pool: {budget_mb: 8}\ntokenizer: {workers: 8}\n",
        "telemetry: {prometheus_port: 65000}\n",
    ],
)
def test_what_is_possible_is_accepted(write, text):
    load(write("name: a\n" + text))


@pytest.mark.parametrize("name", ["local", "ü" * 200, "深" * 200, "👩‍🚀", "a b", "..", "Qwen2.5-VL", "NO"])
def test_names_of_any_script_are_fine(write, name):
    assert load(write(f'name: "{name}"')).name == name


@pytest.mark.parametrize(
    "name", ['""', '" "', "a/b", r'"a\0"', r'"a\nb"', r'"\e[31m"', r'"a\x85b"', r'"a\u2028b"', "n" * 201]
)
def test_names_that_could_not_be_shown_or_stored_are_refused(refusal, name):
    error = refusal(f"nodes: 1\nname: {name}\n")
    assert (error.line, error.key) == (2, "name")


@pytest.mark.parametrize("budget_mb", [16, 17, 100, 1024])
@pytest.mark.parametrize("processes", [1, 3, 16])
def test_p5_all_shares_together_keep_to_the_budget(budget_mb, processes):
    deployment = msgspec.convert(
        {
            "name": "a",
            "pool": {"budget_mb": budget_mb},
            "tokenizer": {"workers": processes},
            "embeddings_pool": {"budget_mb": budget_mb},
            "encoder": {"ranks": processes},
        },
        Deployment,
    )
    for share in (tokenizer_pool_nbytes(deployment), encoder_pool_nbytes(deployment)):
        assert share == budget_mb // processes * MIB
        assert MIB <= share <= share * processes <= budget_mb * MIB


def test_without_pools_there_are_no_shares():
    deployment = Deployment(name="a", transport="cpu")
    assert tokenizer_pool_nbytes(deployment) == encoder_pool_nbytes(deployment) == 0


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("transport: shm\n", [None] * 4),
        ("transport: cuda_ipc\n", [0] * 4),
        ("transport: shm\nencoder: {ranks: 3, devices: [1, 0]}\n", [None, 1, 0, 1]),
        ("transport: cuda_ipc\nencoder: {ranks: 3, devices: [1, 0]}\n", [0, 1, 0, 1]),
        ("transport: shm\ngpus: false\nencoder: {ranks: 3, devices: [1, 0]}\n", [None] * 4),
        ("transport: cpu\nencoder: {ranks: 3, devices: [1, 0]}\n", [None] * 4),
    ],
)
def test_which_gpu_a_rank_works_on(write, text: str, devices: list[int | None]) -> None:
    deployment = load(write(f"name: a\n{text}"))
    found = [device_of(deployment, "tokenizer", 0), *(device_of(deployment, "encoder", rank) for rank in range(3))]
    assert found == devices


def test_a_largest_item_over_the_inline_limit_is_refused(write, refusal):
    text = "name: a\ntokenizer:\n  options: {max_pixels: 99}\nlimits:\n  item_mb: 1\n  request_mb: 2\n"
    load(write(text), largest_item_nbytes=lambda deployment: 2 * MIB)
    error = refusal(text, largest_item_nbytes=lambda deployment: 2 * MIB + 1)
    assert (error.line, error.key) == (6, "limits.request_mb")
    assert "2097153 bytes" in error.problem
    assert "raise limits.request_mb to 3" in error.problem
    error = refusal(text.partition("limits")[0], largest_item_nbytes=lambda deployment: 513 * MIB)
    assert (error.line, error.key) == (3, "tokenizer.options")


@pytest.mark.parametrize(
    ("key", "line"),
    [("model.options.depth", 4), ("model.options.none", 3), ("model", 2), ("encoder.ranks", None), ("", None)],
)
def test_a_check_that_knows_only_the_key_gets_file_and_line(refusal, key, line):
    def check(deployment: Deployment) -> None:
        raise ConfigError("deployment", None, key, "too deep")

    error = refusal("name: a\nmodel:\n  options:\n    depth: 3\n", checks=[(("model",), check)])
    assert (error.line, error.key, error.problem) == (line, key, "too deep")


def test_several_nodes_load_but_do_not_run(write):
    with pytest.raises(ConfigError, match="2 nodes come with a later version") as caught:
        require_available(load(write("name: a\ntransport: cpu\nnodes: 2\n")))
    assert caught.value.key == "nodes"


@pytest.mark.parametrize("transport", ["auto", "cpu", "shm", "cuda_ipc", "cuda_vmm"])
def test_what_this_version_has_may_run(transport):
    require_available(Deployment(name="a", transport=transport))


# --- paths --------------------------------------------------------------------------------------------------


def test_relative_paths_start_at_the_files_folder(write, tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    path = write("name: a\nmodel: {path: weights}\ntokenizer: {vocabulary: ./tokenizer.json}\nruntime_dir: run\n")
    monkeypatch.chdir("/")
    for same in (path, Path(*path.parts[1:])):  # absolute, and relative to the current folder
        deployment = load(same)
        assert deployment.model.path == str(tmp_path / "weights")
        assert deployment.tokenizer.vocabulary == str(tmp_path / "tokenizer.json")
        assert deployment.runtime_dir == str(tmp_path / "run")


def test_relative_paths_of_a_setting_start_at_the_current_folder(write, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(write("name: a\n"), ["runtime_dir=run"]).runtime_dir == str(tmp_path / "elsewhere" / "run")


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("model: {path: none}", "model.path", "none does not exist"),
        ("tokenizer: {vocabulary: .}", "tokenizer.vocabulary", "is not a file; name a tokenizer.json"),
        ('model: {path: ""}', "model.path", "'' is not a path"),
        ("runtime_dir: ~/run", "runtime_dir", "~ is not expanded"),
        (r'runtime_dir: "a\0b"', "runtime_dir", "is not a path"),
    ],
)
def test_paths_that_lead_nowhere_are_refused(refusal, text, key, problem):
    error = refusal(f"name: a\n{text}\n")
    assert (error.line, error.key) == (2, key)
    assert problem in error.problem


# --- there and back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_files_load_and_survive_being_shown(path, write):
    deployment = load(path)
    assert load(write(resolved(deployment))) == deployment


def test_all_the_files_that_should_ship_do():
    assert {path.stem for path in CONFIGS} >= {"local", "local-cpu", "cuda-ipc", "cuda-vmm", "cuda-vmm-two-nodes"}


def test_shown_is_everything_with_shares_as_comments(write):
    text = resolved(load(write("name: a\ntokenizer: {workers: 4}\n")))
    shown = yaml_file.read(write(text)).data
    assert shown == msgspec.json.decode(msgspec.json.encode(load(write(text))))
    assert shown.keys() == set(Deployment.__struct_fields__)
    assert "\npool:  # per tokenizer worker: 256 MiB\n" in text
    assert f'\nname: "{"long " * 30}"\n' in resolved(Deployment(name="long " * 30))
    assert "\npool:  # not used" in resolved(Deployment(name="a", transport="cpu"))


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "0123",
        "12:30:00",
        "NO",
        "yes",
        "on",
        "1e3",
        "1_0",
        "0x1",
        "null",
        "~",
        "",
        ".inf",
        "2024-01-31",
        "a: b",
        "- a",
        "<<",
        "=",
    ]
)


@given(st.dictionaries(TEXTS, SCALARS | TEXTS, min_size=1, max_size=4))
def test_any_values_survive_being_emitted(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "emitted.yaml"
    path.write_text(yaml_file.emit({"options": values}), encoding="utf-8")
    read = yaml_file.read(path).data["options"]
    assert read == values
    assert [type(value) for value in read.values()] == [type(value) for value in values.values()]


def test_a_document_made_by_hand_decodes_too():
    """A library user's dict has no places; errors then name the key alone."""
    document = Document("dict", {"rate": "fast"}, {})
    with pytest.raises(ConfigError) as caught:
        document.decode(Switches)
    assert str(caught.value).startswith("dict: rate: expected a number, got fast (text)")


def test_a_pool_in_gpu_memory_needs_gpus(refusal) -> None:
    problem = refusal("name: a\ntransport: cuda_ipc\ngpus: false\n")
    assert str(problem).endswith(
        ":3: gpus: false, beside transport: cuda_ipc; use shm, cpu or auto, or leave gpus away"
    )


@pytest.mark.parametrize(
    ("text", "mail"),
    [
        ("transport: shm\n", None),
        ("transport: cuda_vmm\n", None),
        ("transport: cuda_vmm\npool: {acknowledge: messages}\n", "posix_fd"),
        ("transport: cuda_vmm\nnodes: 2\n", "fabric"),
        ("transport: cpu\nnodes: 2\n", None),
    ],
)
def test_pools_share_no_pages_across_nodes_and_where_messages_are_asked_for(tmp_path, text, mail):
    file = tmp_path / "deployment.yaml"
    file.write_text("name: a\n" + text)
    assert mail_of(load(file)) == mail
