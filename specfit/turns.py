"""Requests of a session: what they are called, and how one goes on from the answer before."""


def request_id(session: str, turn: int) -> str:
    """Of a session's request; the first one's is the session's."""
    return f"{session}#{turn}" if turn else session


def session_id(request: str) -> str:
    """Of the session that a request belongs to."""
    return request.partition("#")[0]


def next_prompt(
    answered: list[int], finish_reason: str, following: list[int], end_ids: list[int]
) -> list[int]:
    """The prompt of a session's next request.

    An answer that was cut short is ended first, by the template's own end of a turn.

    Args:
        answered: the prompt before and its answer.
        finish_reason: of the answer; `stop` where the model ended it.
        following: what the next request adds.
        end_ids: what ends a turn.
    """
    return answered + ([] if finish_reason == "stop" else end_ids) + following
