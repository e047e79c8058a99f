"""Configuration files: inheritance, overrides, and refusals that name the key."""

import pytest
import yaml

from megamem.config.load import apply_override, config_hash, dump_yaml, load_config, merge, parse_config, read_yaml
from megamem.config.run import RunConfig
from megamem.errors import ConfigError

ELASTIC = {"kind": "elastic_memory", "order": 8, "block": 8}
TREE = {
    "name": "case",
    "model": {
        "layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 64, "chunk_size": 16,
        "memory": [{"layers": [1], "mixer": ELASTIC}],
    },
    "data": {"sources": ["here"], "sequence_length": 64},
    "training": {"steps": 10, "batch_tokens": 256, "precision": "fp32"},
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        return path

    return write


@pytest.fixture
def run_file(write):
    return write("run.yaml", TREE)


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestInheritance:
    def test_nearer_files_win_and_paths_are_relative_to_the_file(self, write):
        write("far/grand.yaml", {"a": 1, "b": {"x": 1, "y": 1}, "c": [1, 2]})
        write("far/parent.yaml", {"base": "grand.yaml", "b": {"y": 2}})
        child = write("child.yaml", {"base": "far/parent.yaml", "b": {"z": 3}, "c": [3]})
        assert read_yaml(child) == {"a": 1, "b": {"x": 1, "y": 2, "z": 3}, "c": [3]}

    def test_several_bases_are_merged_in_order(self, write):
        write("one.yaml", {"a": 1, "b": 1})
        write("two.yaml", {"b": 2, "c": 2})
        assert read_yaml(write("child.yaml", {"base": ["one.yaml", "two.yaml"], "c": 3})) == {"a": 1, "b": 2, "c": 3}

    def test_two_heirs_of_one_file_are_no_loop(self, write):
        write("root.yaml", {"a": 1})
        write("left.yaml", {"base": "root.yaml"})
        write("right.yaml", {"base": "root.yaml", "b": 2})
        assert read_yaml(write("child.yaml", {"base": ["left.yaml", "right.yaml"]})) == {"a": 1, "b": 2}

    @pytest.mark.parametrize("chain", [["a.yaml"], ["b.yaml", "a.yaml"], ["b.yaml", "c.yaml", "a.yaml"]])
    def test_a_loop_is_refused(self, write, chain):
        for name, base in zip(["a.yaml", *chain], chain, strict=False):
            write(name, {"base": base})
        with pytest.raises(ConfigError, match=r"a\.yaml: `base` leads back to the file itself"):
            read_yaml(write("a.yaml", {"base": chain[0]}))

    def test_a_missing_base_names_both_files(self, write):
        with pytest.raises(ConfigError, match=r"gone\.yaml: no such configuration file \(base of .*child\.yaml\)"):
            read_yaml(write("child.yaml", {"base": "gone.yaml"}))

    @pytest.mark.parametrize("base", [3, [3], {"a": 1}])
    def test_a_base_that_is_no_path(self, write, base):
        with pytest.raises(ConfigError, match="base: expected a path or a list of paths"):
            read_yaml(write("child.yaml", {"base": base}))

    def test_empty_files_are_empty(self, write):
        assert read_yaml(write("empty.yaml", "# nothing\n")) == {}


class TestFiles:
    def test_broken_yaml_names_file_and_line(self, write):
        path = write("broken.yaml", "name: x\nmodel: [1, 2\ntraining: {}\n")
        with pytest.raises(ConfigError, match=r"broken\.yaml line 3: not valid YAML: ") as caught:
            read_yaml(path)
        assert "\n" not in str(caught.value)

    def test_a_missing_file_a_folder_and_binary(self, write, tmp_path):
        assert "no such configuration file" in refusal(tmp_path / "gone.yaml")
        assert "no such configuration file" in refusal(tmp_path)
        (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xd8")
        assert "binary.yaml: cannot be read" in refusal(tmp_path / "binary.yaml")

    def test_a_list_is_no_configuration(self, write):
        with pytest.raises(ConfigError, match="expected `key: value` lines, got list"):
            read_yaml(write("list.yaml", "- 1\n- 2\n"))

    @pytest.mark.parametrize(("text", "value"), [("2e-3", 2e-3), ("1E5", 1e5), ("-3e2", -300.0), ("1.5e-3", 1.5e-3)])
    def test_floats_without_a_point_or_sign(self, write, text, value):
        """YAML 1.1 reads them as text."""
        assert read_yaml(write("float.yaml", f"x: {text}\n")) == {"x": value}

    def test_dates_and_times_are_text(self, write):
        assert read_yaml(write("text.yaml", "day: 2024-01-31\nno_day: 2024-99-99\nlimit: 24:00:00\n")) == {
            "day": "2024-01-31",
            "no_day": "2024-99-99",
            "limit": "24:00:00",
        }

    @pytest.mark.parametrize(
        ("text", "line", "said"),
        [
            ("training: {a: 1}\nname: x\ntraining: {b: 2}\n", 3, "'training' is given on line 1 already; keep one"),
            ("a:\n  b: 1\n  'b': 1\n", 3, "'b' is given on line 2 already; keep one"),
            ("a: {<<: {b: 1}, <<: {c: 2}}\n", 1, "'<<' is given on line 1 already; keep one"),
            ("name: x\nsteps: 010\n", 2, "010 begins with 0; write 10, or '010' for text"),
            ("steps: -08\n", 1, "-08 begins with 0; write -8, or '-08' for text"),
            ("steps: 0_0\n", 1, "0_0 begins with 0; write 0, or '0_0' for text"),
            ("a: " + "[" * 5000 + "]" * 5000, 1, "nested more than 64 levels deep"),
            ("a: " + "{a: " * 5000 + "}" * 5000, 1, "nested more than 64 levels deep"),
            ("a: &a [1, *a]\n", 1, "*a stands within what it stands for"),
            ("x: 1\na: &a {b: *a}\n", 2, "*a stands within what it stands for"),
            ("name: x\npath: \"\\ud800\"\n", 2, "text with half a character (\\ud800)"),
        ],
    )  # fmt: skip
    def test_what_is_most_likely_a_slip_names_the_line(self, write, text, line, said):
        with pytest.raises(ConfigError) as caught:
            read_yaml(write("slip.yaml", text))
        assert str(caught.value).endswith(f"slip.yaml line {line}: not valid YAML: {said}")

    def test_a_zero_and_hexadecimal_numbers_stay_numbers(self, write):
        assert read_yaml(write("zero.yaml", "a: 0\nb: 0.5\nc: 0x10\nd: '010'\n")) == {
            "a": 0, "b": 0.5, "c": 16, "d": "010",
        }  # fmt: skip

    def test_the_same_key_in_several_sections_and_in_what_is_merged_in(self, write):
        text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\n"
        assert read_yaml(write("merged.yaml", text)) == {
            "a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 3, "y": 1},
        }  # fmt: skip

    def test_aliases_that_stand_for_billions_of_values(self, write):
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
        with pytest.raises(ConfigError, match=r"bomb.yaml line 5: .*: its aliases stand for more than 100,000 values"):
            read_yaml(write("bomb.yaml", "\n".join(lines)))

    def test_a_control_character_is_one_line(self, write):
        with pytest.raises(ConfigError, match="unacceptable character #x0000: special characters") as caught:
            read_yaml(write("zero.yaml", "name: x\0\n"))
        assert "\n" not in str(caught.value)


class TestMerge:
    def test_a_mixer_of_another_kind_is_replaced(self):
        below = {"mixer": dict(ELASTIC)}
        assert merge(below, {"mixer": {"kind": "full_attention"}}) == {"mixer": {"kind": "full_attention"}}
        assert merge(below, {"mixer": {"kind": "elastic_memory", "order": 16}}) == {"mixer": ELASTIC | {"order": 16}}
        assert merge(below, {"mixer": {"order": 16}}) == {"mixer": ELASTIC | {"order": 16}}

    def test_what_is_merged_stays_as_it_was(self):
        below = {"a": {"b": 1}}
        merge(below, {"a": {"b": 2}})
        assert below == {"a": {"b": 1}}


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "section", "value"),
        [
            ("optimizer.lr=2e-3", lambda c: c.optimizer.lr, 2e-3),
            ("training.steps=7", lambda c: c.steps, 7),
            ("model.memory.0.mixer.order=32", lambda c: c.model.memory[0].mixer.order, 32),
            ("model.memory.0.mixer={kind: full_attention}", lambda c: c.model.memory[0].mixer.kind, "full_attention"),
            ("model.mixer=full_attention", lambda c: c.model.mixer.kind, "full_attention"),
            ("data.sources=[a, b]", lambda c: [s.path for s in c.data.sources], ["a", "b"]),
            ("data.sources=a", lambda c: [s.path for s in c.data.sources], ["a"]),
            ("logging.wandb.mode=disabled", lambda c: c.logging.wandb.mode, "disabled"),
            ("training.bptt_chunks=null", lambda c: c.bptt_chunks, 4),
            ("name=other", lambda c: c.name, "other"),
        ],
    )
    def test_values_are_yaml(self, run_file, override, section, value):
        assert section(load_config(RunConfig, run_file, [override])) == value

    def test_the_last_one_wins_and_others_stay(self, run_file):
        config = load_config(RunConfig, run_file, ["training.steps=3", "training.steps=4"])
        assert (config.steps, config.training.batch_tokens) == (4, 256)

    def test_only_the_first_equals_sign_counts(self):
        assert apply_override({}, "a.b=c=d") == {"a": {"b": "c=d"}}

    @pytest.mark.parametrize("override", ["foo", "=3", ""])
    def test_without_key_or_value(self, run_file, override):
        assert "expected key.path=value" in refusal(run_file, override)

    @pytest.mark.parametrize("index", ["1", "-1", "first", "²"])
    def test_an_index_that_is_none(self, run_file, index):
        assert f"{index!r} is no index of a list of 1" in refusal(run_file, f"model.memory.{index}.layers=[0]")

    def test_a_path_of_too_many_keys(self, run_file):
        message = refusal(run_file, ".".join(["a"] * 5000) + "=1")
        assert message == "a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a....: 5000 keys; a path has at most 64"

    def test_slips_in_a_value(self, run_file):
        assert refusal(run_file, "training={steps: 1, steps: 2}").endswith(
            "'steps' is given on line 1 already; keep one"
        )
        assert refusal(run_file, "training.steps=010").endswith("010 begins with 0; write 10, or '010' for text")

    def test_broken_yaml(self, run_file):
        assert "override 'model.layers=['" in refusal(run_file, "model.layers=[")


class TestRefusals:
    @pytest.mark.parametrize(
        ("key", "near"),
        [
            ("modle", "model"),
            ("training.stpes", "steps"),
            ("logging.wandb.mod", "mode"),
            ("model.memory.0.mixr", "mixer"),
            ("model.memory.0.mixer.ordr", "order"),
            ("data.sequence_lenght", "sequence_length"),
        ],
    )
    def test_an_unknown_key_names_the_nearest(self, run_file, key, near):
        message = refusal(run_file, f"{key}=1")
        assert message.startswith(f"{run_file}: {key}: unknown key; did you mean {near!r}? valid keys here: ")

    def test_an_unknown_key_of_a_source(self, run_file):
        assert "did you mean 'path'? valid keys here: path, weight" in refusal(run_file, "data.sources=[{pth: a}]")

    def test_keys_like_none_list_the_valid_ones(self, run_file):
        message = refusal(run_file, "zzz=1")
        assert "did you mean" not in message
        assert message.endswith("; valid keys here: " + ", ".join(sorted(RunConfig.model_fields)))

    def test_the_keys_of_a_mixer_are_those_of_its_kind(self, run_file):
        message = refusal(run_file, "model.memory.0.mixer={kind: full_attention, order: 3}")
        assert "order: unknown key" in message
        assert "samples" not in message

    @pytest.mark.parametrize(
        ("key", "section", "near"),
        [
            ("model.architecture", "{kind: recurrent_memory, memory_tokns: 2}", "memory_tokns: 'memory_tokens'"),
            ("model.mixer", "{kind: memory_caching, memory: {kind: titans, rte: 1}}", "memory.rte: 'rate'"),
            ("model.mixer", "{kind: sequential, mixers: [retnet, {kind: titans, dcay: 1}]}", "mixers.1.dcay: 'decay'"),
            ("training.callbacks.0", "{kind: weight_norms, evry: 2}", "evry: 'every'"),
            ("training.objective", "{kind: next_token, knd: 2}", "knd: 'kind'"),
        ],
    )  # fmt: skip
    def test_the_keys_of_whatever_has_a_kind_are_those_of_it(self, run_file, key, section, near):
        field, name = near.split(": ")
        override = f"{key}={section}" if key != "training.callbacks.0" else f"training.callbacks=[{section}]"
        message = refusal(run_file, override)
        assert message.startswith(f"{run_file}: {key}.{field}: unknown key; did you mean {name}? valid keys here: ")

    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("training.steps=many", "training.steps: expected an integer (got 'many')"),
            ("training.steps=1.5", "training.steps: expected an integer (got 1.5)"),
            ("training.steps=true", "training.steps: expected an integer (got True)"),
            ("parallel.zero_stage=true", "parallel.zero_stage: expected an integer (got True)"),
            ("logging.profile_steps=[true, 3]", "logging.profile_steps: expected an integer"),
            ("model.memory.0.mixer.order=yes", "model.memory.0.mixer.order: expected an integer (got True)"),
            ("optimizer.lr=false", "optimizer.lr: expected a number (got False)"),
            ("optimizer.lr=.inf", "optimizer.lr: should be a finite number (got inf)"),
            ("optimizer.lr=1e400", "optimizer.lr: should be a finite number (got inf)"),
            ("optimizer.grad_clip=.nan", "optimizer.grad_clip: should be a finite number (got nan)"),
            ("optimizer.lr=fast", "optimizer.lr: expected a number (got 'fast')"),
            ("training.compile=perhaps", "training.compile: expected true or false (got 'perhaps')"),
            ("name=2024", "name: expected text (got 2024)"),
            ("model=3", "model: expected a section of keys (got 3)"),
            ("model.memory=3", "model.memory: expected a list (got 3)"),
            ("training.precision=fp16", "training.precision: should be 'bf16' or 'fp32' (got 'fp16')"),
            ("parallel.zero_stage=4", "parallel.zero_stage: should be 0, 1, 2 or 3 (got 4)"),
            ("optimizer.lr=-1", "optimizer.lr: should be greater than 0 (got -1)"),
            ("model.memory.0.mixer.order=0", "model.memory.0.mixer.order: should be greater than 0 (got 0)"),
            ("training.batch_tokens=null", "training.batch_tokens: expected an integer (got None)"),
        ],
    )
    def test_a_wrong_value_is_shown_with_what_would_be_valid(self, run_file, override, said):
        assert refusal(run_file, override) == f"{run_file}: {said}"

    def test_an_unknown_mixer_is_located(self, run_file):
        message = refusal(run_file, "model.memory.0.mixer.kind=elastic_memroy")
        assert "model.memory.0.mixer: kind: 'elastic_memroy' is no mixer; did you mean 'elastic_memory'?" in message

    def test_a_required_key(self, write):
        tree = {key: value for key, value in TREE.items() if key != "training"}
        assert refusal(write("run.yaml", tree)).endswith("training: required, but not given")

    @pytest.mark.parametrize(
        "override",
        [
            "data.sources=[s3://me:hunter2@bucket/train]",
            "data.sources=[{path: s3://me:hunter2@bucket/train}]",
            "data.validation=[here, https://hunter2@host/validation]",
            "data.sources=['https://host/train?X-Amz-Signature=hunter2']",
            "data.sources=['az://host/train?sv=1&sig=hunter2']",
            "data.sources=[simplecache::s3://me:hunter2@bucket/train]",
            "checkpoint.folder=s3://me:hunter2@bucket",
            "data.tokenizer=s3://me:hunter2@bucket/tokenizer",
        ],
    )
    def test_a_url_with_credentials_is_refused_and_not_shown(self, run_file, override):
        """Configurations are written to run folders, checkpoints, model cards, W&B and the objects of Kubernetes."""
        message = refusal(run_file, override)
        assert "has credentials in its URL; leave them to the environment" in message
        assert "hunter2" not in message

    @pytest.mark.parametrize(
        "path", ["s3://bucket/a@b", "hf://datasets/me/text@main/a", "/data/a@b", "file:///a@b", "a:b@c"]
    )
    def test_a_url_without_credentials_is_taken(self, run_file, path):
        assert load_config(RunConfig, run_file, [f"data.sources=['{path}']"]).data.sources[0].path == path

    def test_several_problems_share_the_line(self, run_file):
        message = refusal(run_file, "training={batch_tokens: x, stps: 3}")
        assert "training.batch_tokens: expected an integer (got 'x'); training.stps: unknown key" in message


class TestDump:
    def test_round_trip(self, run_file, write):
        config = load_config(RunConfig, run_file, ["optimizer.lr=2e-3", "logging.profile_steps=[2, 3]"])
        again = load_config(RunConfig, write("again.yaml", dump_yaml(config)))
        assert again == config
        assert again.model.memory[0].mixer.order == 8
        assert config_hash(again) == config_hash(config)

    @pytest.mark.parametrize("name", ["1e5", "010", "true", "2024-01-31", "12e+3", "0x1f", "null"])
    def test_a_name_that_looks_like_something_else(self, write, name):
        config = parse_config(RunConfig, {**TREE, "name": name}, "test")
        assert load_config(RunConfig, write("again.yaml", dump_yaml(config))).name == name

    def test_the_hash_is_of_the_resolved_values(self, run_file, write):
        config = load_config(RunConfig, run_file)
        explicit = parse_config(RunConfig, {**TREE, "parallel": {"tp": 1}}, "test")
        assert config_hash(explicit) == config_hash(config)
        other = load_config(RunConfig, run_file, ["training.seed=1"])
        assert config_hash(other) != config_hash(config)
        assert len(config_hash(config)) == 12
        assert set(config_hash(config)) <= set("0123456789abcdef")
