from hypothesis import given
from hypothesis import strategies as st

from ninfer.runtime.reuse import output_limit, reusable_tokens

_tokens = st.lists(st.integers(0, 2), max_size=12)


@given(committed=_tokens, prompt=_tokens.filter(bool), recurrent=st.booleans())
def test_reuse_is_a_common_prefix_and_the_longest_allowed(
    committed: list[int], prompt: list[int], recurrent: bool
) -> None:
    reused = reusable_tokens(committed, prompt, recurrent=recurrent)
    assert prompt[:reused] == committed[:reused]
    extends = prompt[: len(committed)] == committed
    if extends:
        assert reused == len(committed)
    elif recurrent:
        assert reused == 0
    else:
        assert reused == len(prompt) - 1 or prompt[reused] != committed[reused]
        assert reused < len(prompt)


@given(requested=st.none() | st.integers(1, 100), context=st.integers(1, 100), data=st.data())
def test_output_limit(requested: int | None, context: int, data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, context))
    limit, by_context = output_limit(requested, max_context=context, prompt_tokens=prompt)
    assert 1 <= limit <= context - prompt + 1
    assert by_context == (requested is None or requested > limit)
