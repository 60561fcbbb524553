"""The tables on SQLite and PostgreSQL: migrations both ways, and fifty raters at once."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from gradwire_feedback.database.connection import Database, UnusableDatabaseError
from gradwire_feedback.database.ownership import LOCK, Ownership
from gradwire_feedback.database.tables import Job, Policy, Table, UtcDateTime
from gradwire_feedback.store import deployments, feedback, jobs, rankings, rating, ratings
from gradwire_feedback.store.order import next_number
from gradwire_feedback.store.problems import ConflictError, ForbiddenError
from support.feedback import FeedbackService, scores
from support.server import Server

RATERS = 50


def test_migrations_make_the_tables_and_take_them_away(database_url: str) -> None:
    database = Database(database_url)
    for _ in range(2):
        database.upgrade()
        with database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        database.downgrade("base")
        left = set(sa.inspect(database.engine).get_table_names()) - {"alembic_version"}
        assert not left & set(Table.metadata.tables)
    database.close()


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_fifty_raters_at_once_lose_nothing(server: Server, database_url: str, tmp_path: Path) -> None:
    """Each posts feedback, a batch with a key sent twice, and rates reserved items until none is left."""
    database = Database(database_url)
    with (
        closing(database),
        FeedbackService(tmp_path, "tiny", "--service", server.address, database=database_url) as service,
    ):
        with database.write() as session:
            for n in range(3 * RATERS):
                rating.add_item(session, "bot", f"prompt {n}", [rating.NewAnswer(f"item-{n}", f"answer {n}")], 1)
        with ThreadPoolExecutor(RATERS) as pool:
            rated = list(pool.map(lambda rater: work(service, database, rater), range(RATERS)))
        with database.read() as session:
            stored = session.execute(sa.text("SELECT run_id, rater FROM feedback WHERE agent_id = 'bot'")).all()
        on_items = [run for run, _ in stored if run.startswith("item-")]
        assert sorted(on_items) == sorted(f"item-{n}" for n in range(3 * RATERS)), "each item was rated once"
        assert sum(rated) == 3 * RATERS
        assert len(stored) - len(on_items) == RATERS * (2 + 3), "a repeated batch counts once"


def work(service: FeedbackService, database: Database, rater: int) -> int:
    with service.client() as api:
        rows: list[dict[str, Any]] = scores(5, start=1000 * rater)
        for row in rows[:2]:
            assert api.post("/feedback/bot", json=row).status_code == 201
        answers = [
            api.post("/feedback/bot", json=rows[2:], headers={"Idempotency-Key": f"rater-{rater}"}) for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert json.loads(answers[0].text) == json.loads(answers[1].text)
    count = 0
    while True:
        with database.write() as session:
            item = rating.reserve(session, "bot", f"rater {rater}")
        if item is None:
            return count
        with database.write() as session:
            rating.rate(session, item.id, f"rater {rater}", [0.5], None)
        count += 1


def test_of_jobs_at_once_one_is_made_and_the_others_name_it(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade()

    def submit(_: int) -> str:
        try:
            with database.write() as session:
                return jobs.create_job(session, "contested", {}).id
        except ConflictError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(submit, range(8)))
    with database.read() as session:
        (made,) = session.scalars(sa.select(Job.id).where(Job.active_agent == "contested"))
    assert told.count(made) == 1
    assert sum(f"is being trained by job {made}" in each for each in told) == 7
    with database.write() as session:  # or the services of later tests would go on with it
        jobs.finish(session, made, "failed", "only a test")
    database.close()


@pytest.fixture
def database(tmp_path: Path) -> Database:
    database = Database(f"sqlite:///{tmp_path / 'rating.db'}")
    database.upgrade()
    return database


def test_an_item_is_with_one_rater_at_a_time_and_never_comes_back(database: Database) -> None:
    with database.write() as session:
        for n in range(2):
            rating.add_item(session, "bot", f"p{n}", [rating.NewAnswer(f"r{n}", "a")], raters=2)
    with database.write() as session:
        first, second = rating.reserve(session, "bot", "ann"), rating.reserve(session, "bot", "bob")
        assert first is not None and second is not None and first.id != second.id
        assert rating.reserve(session, "bot", "cleo") is None
        again = rating.reserve(session, "bot", "ann")
        assert again is not None and again.id == first.id, "one's own reservation is kept"
        rating.rate(session, first.id, "ann", [0.25], None)
        rating.skip(session, second.id, "bob")
        for_bob, for_ann = rating.reserve(session, "bot", "bob"), rating.reserve(session, "bot", "ann")
        assert for_bob is not None and for_bob.id == first.id, "two raters are wanted"
        assert for_ann is not None and for_ann.id == second.id
        rating.rate(session, first.id, "bob", [0.75], "fine")
        assert rating.score_table(session, "bot").tolist() == [[0.25], [0.75]]
    with database.write() as session:
        taken_back = rating.undo(session, "bot", "bob")
        assert taken_back is not None and taken_back.item.id == first.id and taken_back.item.ratings == 1
        assert (taken_back.scores, taken_back.notes) == ((0.75,), "fine")
        assert rating.score_table(session, "bot").shape == (0, 0)
        taken_back = rating.undo(session, "bot", "bob")
        assert taken_back is not None and taken_back.item.id == second.id, "the skip before it"
        assert rating.undo(session, "bot", "bob") is None


def test_two_answers_give_a_pair(database: Database) -> None:
    with database.write() as session:
        both = [rating.NewAnswer("r0", "worse"), rating.NewAnswer("r1", "better")]
        rating.add_item(session, "bot", "p", both, raters=2)
        for rater, given in (("ann", [0.25, 0.75]), ("bob", [0.5, 0.5])):
            item = rating.reserve(session, "bot", rater)
            assert item is not None
            rating.rate(session, item.id, rater, given, None)
        assert rankings.pairs_of(session, "bot") == [rankings.Pair("p", "better", "worse", "ann")]


def test_rankings_give_pairs_and_are_taken_back(database: Database) -> None:
    with database.write() as session:
        answers = [rating.NewAnswer(name, name) for name in ("first", "second", "third")]
        rating.add_item(session, "bot", "p", answers, raters=2, ask="ranking")
        for rater, places in (("ann", [2, 1, 3]), ("bob", [1, 1, 2])):
            item = rating.reserve(session, "bot", rater)
            assert item is not None
            rating.rank(session, item.id, rater, places, "why")
            assert rating.reserve(session, "bot", rater) is None, "it never comes back"
        rankings.add_ranking(session, "bot", "q", ["good", "bad"], None)
        found = [(pair.chosen, pair.rejected, pair.rater) for pair in rankings.pairs_of(session, "bot")]
        of_ann = [("second", "first", "ann"), ("second", "third", "ann"), ("first", "third", "ann")]
        of_bob = [("first", "third", "bob"), ("second", "third", "bob")]
        assert found == [*of_ann, *of_bob, ("good", "bad", None)]

        back = rating.undo(session, "bot", "ann")
        assert back is not None and (back.ranks, back.scores, back.notes) == ((2, 1, 3), (), "why")
        assert len(rankings.pairs_of(session, "bot")) == 3
        mine = rating.reserve(session, "bot", "ann")
        assert mine is not None and mine.id == back.item.id
        theirs = rankings.rankings_of(session, "bot", rater="bob")[0]
        with pytest.raises(ForbiddenError):
            rankings.withdraw_ranking(session, "bot", theirs.ranking.id, "ann", own=True)
        rankings.withdraw_ranking(session, "bot", theirs.ranking.id, "bob", own=True)
        with pytest.raises(ConflictError):
            rankings.withdraw_ranking(session, "bot", theirs.ranking.id, "bob", own=True)
        assert [pair.prompt for pair in rankings.pairs_of(session, "bot")] == ["q"]


def set_clocks_back(database: Database, hours: int) -> None:
    """Change all times of the database, as if the clock had been ahead until now."""
    with database.write() as session:
        for table in Table.metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, UtcDateTime):
                    for (time,) in session.execute(sa.select(column).where(column.is_not(None)).distinct()).all():
                        session.execute(
                            sa.update(table).where(column == time).values({column: time + timedelta(hours=hours)})
                        )


def publish(database: Database, version: str, agent: str = "clocks") -> None:
    with database.write() as session:
        job = jobs.create_job(session, agent, {})
        number = next_number(session, agent)
        policy = Policy(
            agent_id=agent, version=version, number=number, parent="base", job_id=job.id,
            model_path="", reward_model_path="", checkpoint="", feedback_count=0, trained_until=number,
            training_steps=0, reward_mean=0.0,
            reward_std=0.0, config={},
        )  # fmt: skip
        session.add(policy)
        jobs.finish(session, job.id, "succeeded")


def test_neither_names_nor_clocks_order_versions_and_scores(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade()
    for version in ("v12", "v11"):  # a rating was taken back in between
        publish(database, version)
        set_clocks_back(database, 5)
    with database.write() as session:
        assert jobs.newest_version(session, "clocks") == "v11"
        newest = jobs.newest_job(session, "clocks")
        assert newest is not None and jobs.policy_of_job(session, newest.id).version == "v11"
        deployments.deploy(session, "clocks", {"v11": 0.5, "v12": 0.5})
    with database.write() as session:
        for n in range(3):
            deployment = deployments.newest_deployment(session, "clocks")
            assert deployment is not None
            answer = rating.NewAnswer(f"r{n}", "a", "v11")
            rating.add_item(session, "clocks", f"p{n}", [answer], 1, f"u{n}", deployment.number)
    for score in (0.25, 0.5, 0.75):
        with database.write() as session:
            item = rating.reserve(session, "clocks", "ann")
            assert item is not None
            rating.rate(session, item.id, "ann", [score], None)
        set_clocks_back(database, 5)
    with database.write() as session:
        observed = deployments.observe(session, "clocks")
        assert observed is not None and observed.scores.values.tolist() == [0.25, 0.5, 0.75]
        assert list(observed.weights) == ["v12", "v11"], "the older one is the baseline"
        assert feedback.scores_of(session, "clocks") == [0.25, 0.5, 0.75]
        taken_back = rating.undo(session, "clocks", "ann")
        assert taken_back is not None and taken_back.item.prompt == "p2"
    set_clocks_back(database, 5)
    with database.write() as session:
        held = rating.reserve(session, "clocks", "bob")
        assert held is not None and held.prompt == "p2", "a reservation from a clock ahead does not last for hours"
        deployments.deploy(session, "clocks", {"v11": 1.0})
        assert deployments.roll_back(session, "clocks") == {"v12": 1.0}
        assert deployments.roll_back(session, "clocks") == {"base": 1.0}
    database.close()


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_second_service_says_who_holds_the_database(server: Server, database_url: str, tmp_path: Path) -> None:
    first, second = (
        FeedbackService(tmp_path, "tiny", "--service", server.address, database=database_url) for _ in range(2)
    )
    with first:
        refused = second.refused()
        assert f"is in use by the service at {first.url} (process {first.process.pid} on " in refused
        first.end(signal.SIGKILL)
        with second:  # at once: nothing has to expire
            assert first.refused().count(second.url) == 1


@pytest.mark.long
def test_an_owner_that_loses_its_connection_takes_the_lock_again_or_says_it_lost_it(postgres_url: str) -> None:
    first, second = Database(postgres_url), Database(postgres_url)
    first.upgrade()
    owner, other = Ownership(first, "here"), Ownership(second, "there")

    def disconnect() -> None:
        with second.engine.connect() as connection:
            connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = :number"
                ),
                {"number": LOCK & 0xFFFF_FFFF},
            )

    owner.take()
    disconnect()
    assert owner.held()
    with pytest.raises(UnusableDatabaseError, match=f"the service at here .process {os.getpid()}"):
        other.take()
    other.release()
    disconnect()
    other.take()
    assert not owner.held()
    for ownership, database in ((owner, first), (other, second)):
        ownership.release()
        database.close()


def test_versions_know_which_of_their_ratings_were_changed_since(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade()
    agent = "changes"
    with database.write() as session:
        first, second, third = feedback.add_feedback(session, agent, [feedback.Score("p", "r", 0.5, "x")] * 3)
        ratings.withdraw(session, agent, third.id, "ann", own=False)
    publish(database, "v2", agent)
    with database.write() as session:
        assert ratings.changed_since(session, agent) == {}
        ratings.correct(session, agent, first.id, "ann", 0.75, None, own=False)
        ratings.withdraw(session, agent, second.id, "ann", own=False)
    publish(database, "v1", agent)
    with database.read() as session:
        assert ratings.changed_since(session, agent) == {"v2": 2}
        found = {each.feedback.id: each.versions for each in ratings.ratings_of(session, agent)}
        assert found == {first.id: ("v2", "v1"), second.id: ("v2",), third.id: ()}
        assert feedback.scores_of(session, agent) == [0.75]
    with database.write() as session, pytest.raises(ForbiddenError, match="another person's"):
        ratings.correct(session, agent, first.id, "bob", 0.0, None, own=True)
    database.close()
