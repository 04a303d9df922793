"""Every option of the engine and the server is a flag of `specinfer serve` and a key of its file."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from specinfer.cli import serve as serving
from specinfer.cli.options import engine_config, flags, sampling_fields, sampling_options
from specinfer.cli.serve import OPTIONS, configs, read_options, serve, served_models, speculative_config
from specinfer.config import EngineConfig
from specinfer.errors import ConfigError
from specinfer.option import options_of
from specinfer.scheduler_config import CacheConfig, SchedulerConfig
from specinfer.serve.config import ServeConfig
from specinfer.speculation_config import Lookup, SpeculationConfig
from tests.unit.cli.conftest import Run

# Flags of users' scripts: removing or renaming one needs a line in CHANGELOG.
FLAGS = """
--allowed-host --api-key --api-key-file --call-format --chat-template --cluster --config --cors-origin
--device --draft --draft-lora --draft-quantization --dtype --engine-timeout --expansion
--generation-config --grace --help --host --idle-timeout --keep-alive --kernels --key-file
--kv-cache-dtype --kv-cache-memory --local-ranks --log-format --log-level --log-traffic --lookup --lora
--master --max-batch-size --max-body --max-connections --max-context --max-loras --max-n --max-nodes
--max-step-tokens --max-wait --max-waiting --memory --model --model-impl --no-draft --no-lookup --no-page
--no-prepared --no-trust-remote-code --offload --offload-folder --otlp-endpoint --page
--pipeline-parallel --port --prepared --prompt-memory --prompt-store --prompt-store-size --quantization
--reasoning-budget --replicas --root-path --served-model-name --special-tokens-in-messages
--speculative-config --sum-parts --tensor-parallel --threads --tree-size --trust-remote-code
--trusted-proxy --unknown-fields --verifier
"""


@click.command()
@flags(list(OPTIONS.values()))
def config_of(**given: Any) -> None:
    """Print what was given."""
    click.echo({name: value for name, value in given.items() if value not in (None, ())})


def test_the_flags_are_these() -> None:
    context = click.Context(serve)
    found = {flag for p in serve.get_params(context) for flag in (*p.opts, *p.secondary_opts)}
    assert sorted(flag for flag in found if flag.startswith("--")) == FLAGS.split()


def test_every_flag_sets_its_option() -> None:
    for one in (one for one in OPTIONS.values() if not one.about.rare):
        number = "7" if one.kind in (int, float) and not one.about.switch else "text"
        value = [] if one.kind is bool or one.about.switch else [one.choices[-1] if one.choices else number]
        said = CliRunner().invoke(config_of, [one.flag, *value])
        assert list(ast.literal_eval(said.output)) == [one.name], (one.flag, said.output)


def test_the_flags_of_a_request_set_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"type": "object"}')
    numbers = "temperature top_k top_p min_p seed presence_penalty frequency_penalty repetition_penalty"
    given: dict[str, Any] = dict.fromkeys(numbers.split(), 1) | {"max_tokens": 7, "stop": ("end",)}
    given |= {"ignore_eos": False, "prediction": '{"type": "object"}'}
    flags = " ".join(f"--{name.replace('_', '-')} 1" for name in numbers.split())
    flags += f" --max-tokens 7 --stop end --prediction {tmp_path / 'file'}"
    schema = {"type": "json_schema", "json_schema": {"name": "file", "schema": {"type": "object"}}}
    for form, field in {
        "--ignore-eos": {"ignore_eos": True},
        "--regex a": {"regex": "a"},
        "--choice a --choice b": {"choice": ("a", "b")},
        f"--grammar {tmp_path / 'file'}": {"grammar": '{"type": "object"}'},
        f"--json-schema {tmp_path / 'file'}": {"response_format": schema},
    }.items():
        command = click.command()(sampling_options(lambda **_: None))
        options = command.make_context("generate", f"{flags} {form}".split()).params
        assert sampling_fields(options) == given | field, form
        assert options == {}, form


def test_every_field_of_a_config_is_an_option() -> None:
    parts = {"model", "speculation", "cache", "scheduler"}
    for kind in (EngineConfig, SpeculationConfig, SchedulerConfig, CacheConfig, ServeConfig):
        known = {one.attribute for one in options_of(kind)}
        assert known == {field.name for field in fields(kind)} - (parts if kind is EngineConfig else set())


def test_the_file_and_the_defaults_fill_missing_options(tmp_path: Path) -> None:
    said = CliRunner().invoke(config_of, ["--port", "1", "--no-lookup", "--api-key", "a"]).output
    assert ast.literal_eval(said) == {"port": 1, "lookup": False, "api_key": ("a",)}
    file = tmp_path / "options.yaml"
    file.write_text("model: there\nport: 7\nmax-waiting: 3\napi_key: [x, y]\nlookup: true\nmax_body: 1MB\n")
    options, config = configs({"model": None, "port": 9, "lookup": None, "api_key": ()}, file)
    assert options == {"model": "there", "lookup": True, "max_step_tokens": 128}
    assert config == ServeConfig(port=9, max_waiting=3, api_key=("x", "y"), max_body=1 << 20)
    assert engine_config(options).speculation.lookup is True
    assert configs({"lookup": False}, file)[0]["lookup"] is False, "a flag is stronger than the file"
    assert configs({}, None) == ({"model": "smollm2-135m", "max_step_tokens": 128}, ServeConfig())
    assert configs({"max_batch_size": 200}, None)[0]["max_step_tokens"] == 200


def test_a_number_may_be_a_word_where_there_is_one(tmp_path: Path) -> None:
    def run(*flags: str) -> str:
        return CliRunner().invoke(config_of, flags).output

    said = run("--max-nodes", "auto", "--max-step-tokens", "7")
    assert ast.literal_eval(said) == {"max_nodes": "auto", "max_step_tokens": 7}
    assert "'all' is not a valid integer, nor auto." in run("--max-nodes", "all")
    assert "'auto' is not a valid integer." in run("--threads", "auto")
    file = tmp_path / "options.yaml"
    file.write_text("max-step-tokens: auto\n")
    assert engine_config(configs({}, file)[0]).scheduler.max_step_tokens == "auto"


def test_the_files_keys_of_memory(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("memory: 1.5GB\noffload: auto\noffload-folder: ~/fast\n")
    config = engine_config(configs({}, file)[0])
    assert (config.memory, config.offload, config.offload_folder) == (3 << 29, "auto", "~/fast")
    assert config.scheduler.max_step_tokens == "auto", "a pass reads the weights: the more rows the better"
    assert engine_config(configs({"memory": "8GB"}, file)[0]).memory == 8 << 30
    file.write_text("memory: 8QB\n")
    with pytest.raises(ConfigError, match="memory is '8QB'; allowed: a number of bytes, or like 512MB or"):
        configs({}, file)


def test_a_text_in_the_file_is_one_key_and_not_its_letters(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    given = {"api_key": "k", "served_model_name": "tiny", "cors_origin": "http://a.b", "allowed_host": "a.b"}
    file.write_text("".join(f"{name}: {text}\n" for name, text in given.items()))
    _, config = configs({}, file)
    assert {name: getattr(config, name) for name in given} == {name: (given[name],) for name in given}


def test_a_batch_that_is_no_number_is_left_to_the_engines_config() -> None:
    options, _ = configs({"max_batch_size": "many"}, None)
    with pytest.raises(ConfigError, match="max_batch_size is 'many'"):
        engine_config(options)


def test_a_file_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    for text, message in {
        "prot: 1": "unknown option 'prot'; did you mean port?",
        "[1, 2]": "holds list; allowed: options",
        "a: b: c": "cannot read the options",
        "\x00": "cannot read the options",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"options\.yaml") as error:
            pytest.fail(f"{text!r} is read as {read_options(file)}")
        assert message in str(error.value), text
    with pytest.raises(ConfigError, match="No such file"):
        read_options(tmp_path / "none")
    file.write_text("")
    assert read_options(file) == {}


def test_the_models_of_a_server(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"

    def served(text: str, *words: str, **given: Any) -> list[tuple[tuple[str, ...], EngineConfig]]:
        file.write_text(text)
        options = {"model": next(iter(words), None), **given}
        return [(one.names, one.engine) for one in served_models(options, words, file if text else None)[1]]

    [(names, first), (_, second)] = served("", "a.gguf", "b.gguf", memory="8GB")
    assert (names, first.model, second.model, first.memory) == (("a.gguf",), "a.gguf", "b.gguf", 8 << 30)
    listed = "models:\n- {model: a.gguf, alias: [small, tiny], draft: [c], kv-cache-memory: 1GB}\n- b.gguf\n"
    listed += "dtype: float32\nquantization: int8\n"
    [(names, first), (others, second)] = served(listed, dtype="bfloat16")
    assert (names, others, first.speculation.drafts) == (("small", "tiny"), ("b.gguf",), ("c",))
    assert (first.cache.memory, second.cache.memory) == (1 << 30, None)
    assert (first.dtype, second.quantization) == ("bfloat16", "int8"), "flags override the file"
    assert served("models: [a]\n")[0][0] == served("", "a")[0][0] == ("a",)
    (tmp_path / "m.gguf").touch()
    (tmp_path / "of").mkdir()
    (tmp_path / "of" / "m.gguf").touch()
    paths = [str(tmp_path / "m.gguf"), str(tmp_path / "of" / "m.gguf")]
    assert [names for names, _ in served("", *paths)] == [(path,) for path in paths]
    for model, name in ((tmp_path / "m.gguf", "m"), (tmp_path, tmp_path.name), (f"{tmp_path}/../m", None)):
        [[names, _]] = served("", str(model))
        assert names == served(f"models: ['{model}']\n")[0][0] == (name or str(model),)
    assert served("", str(tmp_path), served_model_name=("x", "y"))[0][0] == ("x", "y")
    for text, words, given, message in (
        ("", ("a", "a"), {}, "two models have the name 'a'"),
        ("models: [{model: a, alias: x}, {model: b, alias: x}]", (), {}, "two models have the name 'x'"),
        ("models: [a, b]", ("c",), {}, "has models, and the command line has 'c'"),
        ("models: [a, b]\nmodel: c", (), {}, "has model and models"),
        ("models: []", (), {}, "a wrong list of models"),
        ("models: [{alias: x}]", (), {}, "a wrong list of models"),
        ("models: [{model: a, alias: 7}, b]", (), {}, "alias has a value that is no text"),
        ("models: [{model: a, memory: 8GB}, b]", (), {}, "unknown option 'memory'"),
        ("models: [{model: a, port: 80}, b]", (), {}, "unknown option 'port'"),
        ("models: [{model: a, tensor_parallel: 2}, b]", (), {}, "tensor_parallel 2 with several models; al"),
        ("", ("a", "b"), {"device": "cuda"}, "device is 'cuda' with several models"),
        ("", ("a", "b"), {"replicas": 2}, "replicas is 2 with several models; leave it out"),
        ("", ("a",), {"keep_alive": 5.0}, "keep_alive is 5.0 with one model, which stays loaded; leave it"),
        ("models: [a]\nkeep-alive: 5.0", (), {}, "keep_alive is 5.0 with one model"),
        ("", ("a", "b"), {"log_traffic": "x"}, "log_traffic is 'x' with several"),
        ("", ("a", "b"), {"served_model_name": ("x",)}, "served_model_name is ('x',) with several"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            pytest.fail(f"{text} {words} {given} is {served(text, *words, **given)}")
    assert "two models have the name 'a'" in str(CliRunner().invoke(serve, ["a", "b", "a"]).exception)
    file.write_text("models: [a, b]")
    with pytest.raises(ConfigError, match="has models; allowed here: one `model`"):
        configs({}, file)


def test_an_option_out_of_range() -> None:
    invalid: list[dict[str, Any]] = [
        *({"port": -1}, {"port": 70000}, {"port": True}, {"max_n": 0}, {"max_body": 10}, {"grace": 0}),
        *({"idle_timeout": float("nan")}, {"log_format": "xml"}),
        *({"log_level": "loud"}, {"api_key": (" a",)}, {"api_key": ("",)}, {"api_key": ("\u00e4",)}),
        *({"api_key": "sesame"}, {"api_key": (12345,)}, {"served_model_name": "tiny"}, {"host": 0}),
        *({"api_key_file": 1}, {"idle_timeout": "75"}, {"grace": True}, {"page": "no"}),
        *({"trusted_proxy": ("proxy",)}, {"trusted_proxy": ("10.0.0.0/99",)}),
        *({"grace": 0}, {"max_wait": -1}, {"ping_interval": "15"}, {"engine_timeout": float("nan")}),
        *({"root_path": "llm"}, {"root_path": "/llm/"}),
    ]
    for options in invalid:
        with pytest.raises(ConfigError):
            pytest.fail(f"{options} is {ServeConfig(**options)}")


def test_vllms_config_is_understood() -> None:
    ngram = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    cases: list[tuple[Any, dict[str, Any]]] = [
        (ngram, {"lookup": True, "lookup_depth": 5}),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, {"lookup": True, "lookup_depth": 9}),
        ({"model": "small", "num_speculative_tokens": 3}, {"drafts": "small", "expansion": "1,1,1"}),
    ]
    for given, options in cases:
        assert speculative_config(given) == options, given
        EngineConfig.from_options("m", options)


def test_unsupported_options_of_vllm_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ("{", "not JSON"),
        ([], "a mapping with a method"),
        ({"method": "eagle3", "model": "x"}, "allowed here: ngram, suffix, draft_model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "draft_model"}, "no model; name the draft"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "has disable_by_batch_size"),
        ({"model": "x", "draft_tensor_parallel_size": 2}, "runs in one process here"),
    ]
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{given} is {speculative_config(given)}")


def test_a_models_own_head_guesses_where_no_speculator_is_named() -> None:
    cases: list[tuple[dict[str, Any], tuple[Lookup, tuple[str, ...]]]] = [
        ({"model": "smollm2-135m"}, ("auto", ("smollm2-135m-head",))),
        ({"model": "another"}, ("auto", ("auto",))),
        ({"model": "another", "no_draft": True}, ("auto", ())),
        ({"model": "smollm2-135m", "no_draft": True}, ("auto", ())),
        ({"model": "another", "drafts": []}, ("auto", ())),
        ({"model": "another", "max_nodes": 1}, ("auto", ())),
        ({"model": "smollm2-135m", "max_nodes": 1}, ("auto", ())),
        ({"model": "smollm2-135m", "lookup": False}, (False, ())),
        ({"model": "smollm2-135m", "lookup": True}, (True, ())),
        ({"model": "smollm2-135m", "drafts": ("mine",)}, ("auto", ("mine",))),
        ({"model": "smollm2-135m", "drafts": ("mine",), "lookup": False}, (False, ("mine",))),
    ]
    for options, speculators in cases:
        chosen = engine_config(dict(options)).speculation
        assert (chosen.lookup, chosen.drafts) == speculators, options


def test_options_of_a_draft_need_a_named_one() -> None:
    for name, value in {"draft_quantization": "int8", "expansion": "1,1"}.items():
        for drafts in ((), [], "auto", ["auto"], ("auto",)):
            with pytest.raises(ConfigError, match=f"{name} is for draft models, and none is named"):
                engine_config({"model": "another", "drafts": drafts, name: value})


def test_no_draft_removes_the_drafts_of_a_file_and_of_a_speculative_config(tmp_path: Path) -> None:
    vllm, file = '{"model": "small", "num_speculative_tokens": 3}', tmp_path / "serve.yaml"
    for text, given in {
        "drafts: [small]\ndraft-quantization: int8\n": {},
        f"speculative_config: {vllm}\n": {},
        "port: 8000\n": {"speculative_config": vllm},
    }.items():
        file.write_text(text)
        for more, drafts in (({}, ("small",)), ({"no_draft": True}, ())):
            engine = engine_config(configs({"model": "another", **given, **more}, file)[0])
            assert engine.speculation.drafts == drafts, (text, more)
    with pytest.raises(ConfigError, match="--no-draft and --draft small exclude each other"):
        engine_config(configs({"model": "another", "drafts": ("small",), "no_draft": True}, None)[0])


def test_a_server_that_listens_names_the_api_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    for url, page in {
        "http://0.0.0.0:8000": ["http://127.0.0.1:8000/"],
        "http://[::]:9": ["http://[::1]:9/"],
        "http://127.0.0.1:8000": [],
    }.items():
        serving._print_address(url, models=["tiny"], page=bool(page))
        message = capsys.readouterr().err.splitlines()
        assert [re.findall(r"http\S+", line) for line in message] == [[one] for one in (f"{url}/v1", *page)]
        assert "the model 'tiny' " in message[0]


def test_an_empty_key_in_the_environment_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECINFER_API_KEY", "")
    status, _, err = run("serve", "m")
    assert (status, "SPECINFER_API_KEY is empty" in err) == (2, True), err
