"""No password of a store is ever shown, and an address without one stays what it is."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overnight.core.addresses import shown
from overnight.core.errors import BadInputError
from overnight.trainer.checkpoint.place import LocalPlace, open_place
from overnight.trainer.checkpoint.remote import RemotePlace

SECRET = "Hunter2Hunter2"
plain = st.text("abcdefghij0123456789.-_%+~", min_size=1, max_size=12)
prefixes = st.text("abc09:@/?#&=%+ *", max_size=4).filter(lambda text: not re.match(r"\d+[/?#]", text))
passwords = st.builds("{}{}{}".format, prefixes, st.just(SECRET), plain)


@example("sftp", "0", f"/{SECRET}", "0", "0")
@given(st.sampled_from(["sftp", "ftp", "webdav", "s3", "simplecache::sftp"]), plain, passwords, plain, plain)
def test_whatever_a_password_consists_of_it_is_not_shown(
    scheme: str, user: str, password: str, host: str, path: str
) -> None:
    text = shown(f"{scheme}://{user}:{password}@{host}:22/{path}")
    assert text == f"{scheme}://{user}:***@{host}:22/{path}"
    assert shown(text) == text


@pytest.mark.parametrize("name", ["password", "passphrase", "key", "secret", "access_token", "sig", "apiKey", "pwd"])
def test_secrets_in_the_query_are_not_shown(name: str) -> None:
    url = f"store://user@host/x?block_size=3&{name}={SECRET}&versionId=7#part"
    assert shown(url) == f"store://user@host/x?block_size=3&{name}=***&versionId=7#part"


@pytest.mark.parametrize(
    "address",
    [
        "/home/me/a:b@c", "s3://bucket/me@work:1@x", "sftp://host:22/data@v2/x", "sftp://me@host/x", "gs://b/x?y=z",
        "az://container@account.dfs.core.windows.net/x", "local:///tmp/x", "", "digits-7@2000",
    ],
)  # fmt: skip
def test_what_holds_no_secret_stays_as_it_is(address: str) -> None:
    assert shown(address) == address


def test_the_text_of_a_place_is_for_people_and_its_url_opens_it(tmp_path: object) -> None:
    url = f"memory://user:{SECRET}@host/trial/checkpoints"
    place = open_place(url)
    assert isinstance(place, RemotePlace) and place.url == url
    assert str(place) == "memory://user:***@host/trial/checkpoints"
    local = open_place(f"{tmp_path}/a:b@c")
    assert isinstance(local, LocalPlace) and str(local) == local.url == f"{tmp_path}/a:b@c"


@pytest.mark.parametrize("url", [f"nosuch://user:{SECRET}@host/x", f"sftp://user:{SECRET}/x@host/y"])
def test_an_address_that_is_refused_is_told_without_its_password(url: str) -> None:
    with pytest.raises(BadInputError) as raised:
        open_place(url)
    assert SECRET not in f"{raised.value}" and "user:***@host" in raised.value.message
    assert raised.value.__cause__ is None or SECRET not in f"{raised.value.__cause__}"
