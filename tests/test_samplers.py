"""Samplers draw feasible configurations, each once, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from spaces import feasible

from tuner.errors import InputError
from tuner.search.optuna_codec import ABSENT, distributions, encoded, params_of
from tuner.search.samplers import SAMPLERS, SpaceExhausted, make_sampler
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
from tuner.trial import Params

optuna.logging.set_verbosity(optuna.logging.WARNING)


def small_space() -> SearchSpace:
    return SearchSpace.build(
        [
            Parameter("template", ("wgmma", "mma", "library")),
            Parameter("block_m", (32, 64, 128, 256)),
            Parameter("stages", (2, 3, 4), Expression.parse("template != 'library'")),
            Parameter("vector", (True, False)),
            Parameter("one", (7,)),
        ],
        [
            Constraint(Expression.parse("block_m * stages <= 256"), "fits"),
            Constraint(Expression.parse("vector or block_m >= 64"), "wide enough"),
        ],
        {},
    )


def wide_space() -> SearchSpace:
    """2 % feasible, so that an inner sampler's draws mostly are not."""
    values = tuple(range(10))
    parameters = [Parameter(name, values) for name in ("a", "b", "c")]
    rule = Constraint(Expression.parse("(a + b + c) == 13 and a != b"), "on a plane")
    return SearchSpace.build(parameters, [rule], {})


def make_study(space: SearchSpace, name: str, seed: int = 0, path: Path | None = None):
    storage = JournalStorage(JournalFileBackend(str(path))) if path else None
    return optuna.create_study(storage=storage, sampler=make_sampler(name, space, seed))


def ask(study: optuna.Study, space: SearchSpace) -> tuple[optuna.Trial, Params]:
    trial = study.ask(fixed_distributions=distributions(space))
    return trial, params_of(trial, space)


def objective_of(params: Params) -> float:
    return float(len(str(sorted(params.items()))) + int(params.get("block_m", params.get("a", 0))))


def run(study: optuna.Study, space: SearchSpace, count: int) -> list[Params]:
    seen = []
    for number in range(count):
        trial, params = ask(study, space)
        seen.append(params)
        if number % 3 == 2:
            study.tell(trial, state=TrialState.PRUNED if number % 2 else TrialState.FAIL)
        else:
            study.tell(trial, objective_of(params))
    return seen


@pytest.mark.parametrize("make", [small_space, wide_space])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_feasible_configuration_is_drawn_exactly_once_and_then_the_space_is_exhausted(
    name, make
):
    space = make()
    study = make_study(space, name)
    seen = run(study, space, space.num_feasible)
    assert sorted(space.index(params) for params in seen) == list(range(space.num_feasible))
    with pytest.raises(SpaceExhausted):
        ask(study, space)
    assert not [trial for trial in study.trials if trial.state is TrialState.RUNNING]


@pytest.mark.parametrize("name", SAMPLERS)
def test_running_trials_are_not_drawn_again(name):
    space = small_space()
    study = make_study(space, name)
    run(study, space, 12)
    asked = [ask(study, space) for _ in range(8)]
    drawn = [space.index(params_of(trial, space)) for trial in study.trials]
    assert len(set(drawn)) == len(drawn) == 20
    for trial, params in reversed(asked):
        study.tell(trial, objective_of(params))


@pytest.mark.parametrize("name", SAMPLERS)
def test_equal_seeds_give_equal_sequences_also_through_a_journal_file(name, tmp_path):
    space = wide_space()
    in_memory = run(make_study(space, name, seed=5), space, 30)
    in_file = run(make_study(space, name, seed=5, path=tmp_path / "journal"), space, 30)
    assert in_memory == in_file


@pytest.mark.parametrize("name", ["surrogate", "tpe", "random"])
def test_other_seeds_give_other_sequences(name):
    space = wide_space()
    first, second = (run(make_study(space, name, seed=s), space, 20) for s in (1, 2))
    assert first != second


def test_grid_goes_in_the_order_of_declaration():
    space = small_space()
    assert run(make_study(space, "grid"), space, 9) == feasible(space)[:9]


def test_a_reopened_journal_remembers_what_was_tried(tmp_path):
    space = small_space()
    before = run(make_study(space, "random", path=tmp_path / "journal"), space, 10)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal")))
    (summary,) = optuna.get_all_study_summaries(storage)
    again = optuna.load_study(
        study_name=summary.study_name, storage=storage, sampler=make_sampler("random", space, 0)
    )
    after = run(again, space, space.num_feasible - 10)
    config_ids = [space.index(params) for params in before + after]
    assert len(set(config_ids)) == space.num_feasible


def test_trials_added_with_encoded_params_count_as_tried():
    space = small_space()
    study = make_study(space, "grid")
    for params in feasible(space)[:5]:
        trial = optuna.create_trial(
            state=TrialState.PRUNED,
            params=encoded(params, space),
            distributions=distributions(space),
        )
        study.add_trial(trial)
    _, params = ask(study, space)
    assert params == space.at(5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_enqueued_configurations_come_first_and_are_not_drawn_again(name):
    space = small_space()
    study = make_study(space, name)
    wanted = [space.at(i) for i in (3, 0, 11)]
    for params in wanted:
        study.enqueue_trial(encoded(params, space))
    seen = run(study, space, space.num_feasible)
    assert seen[:3] == wanted
    assert len({space.index(params) for params in seen}) == space.num_feasible


def test_an_absent_parameter_is_a_choice_of_the_study_and_not_of_the_params():
    space = small_space()
    study = make_study(space, "grid")
    drawn = run(study, space, space.num_feasible)
    library = [params for params in drawn if params["template"] == "library"]
    assert library and all("stages" not in params for params in library)
    stages = {t.params["template"]: t.params["stages"] for t in study.trials}
    assert stages["library"] == ABSENT and stages["mma"] in (2, 3, 4)
    assert all(space.index(params) is not None for params in drawn)


def test_tpe_finds_the_good_region_sooner_than_chance():
    values = tuple(range(8))
    parameters = [Parameter(name, values) for name in ("a", "b", "c", "d")]
    rule = Constraint(Expression.parse("(a + b + c + d) % 2 == 0"), "even")
    space = SearchSpace.build(parameters, [rule], {})

    def best(name: str, seed: int) -> float:
        study = make_study(space, name, seed)
        for _ in range(60):
            trial, params = ask(study, space)
            study.tell(trial, float(sum((int(v) - 5) ** 2 for v in params.values())))
        return study.best_value

    tpe = sum(best("tpe", seed) for seed in range(4))
    assert tpe < sum(best("random", seed) for seed in range(4))


def test_tpe_stays_away_from_what_fails():
    values = tuple(range(8))
    parameters = [Parameter("a", values), Parameter("b", values), Parameter("c", values)]
    space = SearchSpace.build(parameters, [], {})
    study = make_study(space, "tpe")
    for _ in range(60):
        trial, params = ask(study, space)
        if int(params["a"]) < 6:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, float(int(params["b"]) + 1))
    late = [trial.state for trial in study.trials[20:]]
    assert late.count(TrialState.COMPLETE) > len(late) * 0.5  # chance is 25 %


def test_a_template_that_always_fails_is_left_until_nothing_else_is():
    space = small_space()
    study = make_study(space, "surrogate")
    wrong = []
    for _ in range(space.num_feasible):
        trial, params = ask(study, space)
        wrong.append(params["template"] == "mma")
        if wrong[-1]:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, objective_of(params))
    num_others = wrong.count(False)
    assert wrong[: num_others + 3].count(True) <= 4  # those of the opening
    assert all(wrong[num_others + 4 :])  # and in the end every one is asked for


def test_tpe_draws_from_a_space_of_more_than_a_million_millions():
    parameters = [Parameter(f"p{i}", tuple(range(10))) for i in range(14)]
    rules = [Constraint(Expression.parse(f"p{i} + p{i + 1} == 9"), "a tenth") for i in (0, 2)]
    space = SearchSpace.build(parameters, rules, {})
    assert space.num_feasible == 10**12
    study = make_study(space, "tpe")  # one draw of a hundred is feasible, so that it takes the
    for _ in range(14):  # nearest after its first ten, which are random
        trial, params = ask(study, space)
        assert space.index(params) is not None
        study.tell(trial, float(sum(int(value) for value in params.values())))


def test_an_unknown_sampler_names_the_known_ones():
    with pytest.raises(InputError) as error:
        make_sampler("tpee", small_space(), 0)
    known = ", ".join(SAMPLERS)
    assert str(error.value) == (
        f"unknown sampler 'tpee'\n  known: {known}\n  hint: did you mean 'tpe'?"
    )


def test_a_parameter_outside_the_space_is_refused():
    space = small_space()
    trial, _ = ask(make_study(space, "random"), space)
    with pytest.raises(InputError, match="warp_n is not a parameter"):
        trial.suggest_int("warp_n", 1, 4)
