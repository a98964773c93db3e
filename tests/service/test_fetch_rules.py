import ipaddress
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fetch_rules import is_public_address, parse_hosts, parse_url

CLOSED = [
    # IPv4: this network, private, shared, loopback, link-local
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.9"),
    *("169.254.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255"),
    # metadata: AWS and most others, ECS tasks, Alibaba, Azure, Oracle
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    # protocol assignments, documentation, AS112, tunnels, benchmarks
    *("192.0.0.8", "192.0.0.9", "192.0.0.170", "192.0.2.1", "198.51.100.1", "203.0.113.1"),
    *("192.31.196.1", "192.52.193.1", "192.88.99.1", "192.175.48.1", "198.18.0.1", "198.19.255.255"),
    # multicast, reserved, broadcast
    *("224.0.0.1", "233.252.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    # IPv6: unspecified, loopback, compatible, mapped, translated
    *("::", "::1", "::7f00:1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8"),
    *("::ffff:0:8.8.8.8", "64:ff9b::10.0.0.1", "64:ff9b::8.8.8.8", "64:ff9b:1::10.0.0.1"),
    # discard, Teredo, benchmarks, ORCHID, documentation, 6to4, ISATAP, AS112, segment routing
    *("100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1"),
    *("2001:db8::1", "3fff::1", "2002:7f00:1::1", "2002:808:808::1", "2620:4f:8000::1", "5f00::1"),
    *("2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:10.0.0.1"),
    # unique local, metadata of AWS and Google, link-local, site-local, multicast, never given out
    *("fc00::1", "fdff::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fe80::a9fe:a9fe", "fe80::1%eth0"),
    *("fec0::1", "ff02::1", "ff0e::1", "4000::1", "8000::1", "e000::1", "2606:4700::1111%eth0"),
]

OPEN = [
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.1", "126.255.255.255"),
    *("128.0.0.1", "169.253.255.255", "172.15.255.255", "172.32.0.1", "192.167.0.1", "198.17.0.1", "223.255.255.254"),
    *("168.63.129.15", "2606:4700:4700::1111", "2001:4860:4860::8888", "2a00:1450:4001:80e::200e", "2003::1"),
]


@pytest.mark.parametrize("address", CLOSED)
def test_an_address_that_is_not_certainly_public_is_closed(address: str) -> None:
    assert not is_public_address(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", OPEN)
def test_a_public_address_is_open(address: str) -> None:
    assert is_public_address(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_no_form_of_an_ipv4_address_inside_an_ipv6_address_is_open(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    forms = [
        number,
        0xFFFF << 32 | number,
        0xFFFF << 48 | number,
        0x64FF9B << 96 | number,
        0x2002 << 112 | number << 80,
    ]
    for form in [*forms, 0x20010000 << 96 | number ^ 0xFFFFFFFF, 0xFE80 << 112 | 0x5EFE << 32 | number]:
        assert not is_public_address(ipaddress.IPv6Address(form))


# URLs


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port", "target", "place"),
    [
        ("http://a.test", "http", "a.test", 80, "/", "a.test"),
        ("HTTPS://A.Test:443/x?y=1#z", "https", "a.test", 443, "/x?y=1", "a.test"),
        ("https://a.test.:8443/", "https", "a.test", 8443, "/", "a.test:8443"),
        ("http://a.test?q#f?", "http", "a.test", 80, "/?q", "a.test"),
        ("http://a.test/%2e%2e/ü%C3%BC<>", "http", "a.test", 80, "/%2e%2e/%C3%BC%C3%BC%3C%3E", "a.test"),
        ("http://bücher.test/", "http", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://BÜCHER。test/", "http", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://XN--BCHER-KVA.test/", "http", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://\uff45xample.test", "http", "example.test", 80, "/", "example.test"),
        ("http://my_bucket.a-b.test/", "http", "my_bucket.a-b.test", 80, "/", "my_bucket.a-b.test"),
        ("http://1.2.3.4:80/", "http", "1.2.3.4", 80, "/", "1.2.3.4"),
        ("http://\uff11.2.3.4/", "http", "1.2.3.4", 80, "/", "1.2.3.4"),
        ("http://[2606:4700:0::1111]:81/", "http", "2606:4700::1111", 81, "/", "[2606:4700::1111]:81"),
        ("http://a.test//b.test/@c.test", "http", "a.test", 80, "//b.test/@c.test", "a.test"),
    ],
)
def test_a_url_is_taken_apart(text: str, scheme: str, host: str, port: int, target: str, place: str) -> None:
    url = parse_url(text)
    assert (url.scheme, url.host, url.port, url.target, url.place) == (scheme, host, port, target, place)


@pytest.mark.parametrize(
    "text",
    [
        *("", "http:", "http://", "http:///x", "http:/a.test/", "http:a.test", "//a.test/", "a.test", "http://:80/"),
        *("file:///etc/passwd", "file://a.test/x", "ftp://a.test/", "gopher://a.test/", "data:,x", "unix:///run/x"),
        *("javascript:x", "jar:http://a.test/", "http+unix://a.test/", "dict://a.test", "ws://a.test/"),
        *("http://user@a.test/", "http://user:pass@a.test/", "http://@a.test/", "http://a.test@b.test/"),
        *("http://a.test\\@b.test/", "http://a.test\\b", "http:\\\\a.test/", "http://a.test/\\x"),
        *("http://a.test:80:80/", "http://a.test:/", "http://a.test:x/", "http://a.test:-1/", "http://a.test:٨٠/"),
        *("http://a.test:65536/", "http://a.test:99999999/", "http://a.test:+80/", "http://a.test: 80/"),
        *("http://a..test/", "http://.a.test/", "http://a.test../", "http://./", "http://-a.test/", "http://a-.test/"),
        *("http://a%2etest/", "http://%61.test/", "http://a.test%00.b.test/", "http://a.test%2f@b.test/"),
        *(
            "http://a.test\x00.b.test/",
            "http://a\t.test/",
            "http://a.test/\r\nHost: b",
            "http://a.test/ x",
            "http://a b/",
        ),
        *("http://a*b.test/", "http://*.test/", "http://a,b.test/", "http://a;b/", "http://a&b/", "http://a'b/"),
        *(
            "http://a.test℀b/",
            "http://a.test\uff0fb/",
            "http://a.test\uff20b.test/",
            "http://a\uff1a80/",
            "http://a\uff03b/",
        ),
        *("http://\ud800.test/", "http://a.test/\ud800", "http://\u200b/", "http://\xad/"),
        *("http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://0177.0.0.1/"),
        *("http://127.0.0.1.2/", "http://1.2.3.256/", "http://1.2.3.04/", "http://a.test.1/", "http://a.0x/"),
        *(
            "http://[::1/",
            "http://::1/",
            "http://[::1%25eth0]/",
            "http://[::1]x/",
            "http://[v1.a]/",
            "http://[a.test]/",
        ),
        *("http://[]/", "http://[1.2.3.4]/", "http://[::1][::2]/", "http://[[::1]]/", "http://[:::1]/"),
        *(f"http://{'a' * 64}.test/", f"http://{'a.' * 127}test/", f"http://a.test/{'x' * 8192}"),
        *("http://xn--\u0080.test/", "http://ü" + "ü" * 63 + ".test/"),
    ],
)
def test_what_is_no_plain_web_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_url(text)


@given(
    st.text(max_size=40), st.sampled_from(["{}", "http://{}", "http://a.test{}", "http://[{}]/", "https://a.test/{}"])
)
def test_any_text_is_a_url_of_safe_parts_or_refused(text: str, form: str) -> None:
    try:
        url = parse_url(form.format(text))
    except ValueError:
        return
    assert url.target.startswith("/")
    assert not set(url.target + url.place) - {chr(code) for code in range(0x21, 0x7F)}
    assert not set(url.host) & set("/?#@\\%[]")
    assert parse_url(f"{url.scheme}://{url.place}{url.target}") == url


@pytest.mark.parametrize(
    ("location", "place", "target"),
    [
        ("/b", "a.test:81", "/b"),
        ("b?c#d", "a.test:81", "/x/b?c"),
        ("//b.test/c", "b.test", "/c"),
        ("HTTPS://b.test", "b.test", "/"),
        ("", "a.test:81", "/x/y?z"),
        ("../../../../etc", "a.test:81", "/etc"),
    ],
)
def test_a_redirect_is_followed_from_where_it_stands(location: str, place: str, target: str) -> None:
    url = parse_url("http://a.test:81/x/y?z").join(location)
    assert (url.place, url.target) == (place, target)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "//u@b.test/", "\\\\b.test\\x", "http:\t//b.test", "/a b", "//[", "ftp://a.test:81/"],
)
def test_a_redirect_is_read_as_strictly(location: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_url("http://a.test:81/x/y?z").join(location)


# Lists of hosts


@pytest.fixture
def allows() -> Callable[[str, str], bool]:
    return lambda hosts, url: any(rule.allows(parse_url(url)) for rule in parse_hosts(hosts))


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ("a.test", "http://a.test/"),
        ("a.test", "https://A.TEST./"),
        ("A.test.", "https://a.test:443/"),
        ("a.test", "http://a.test:443/"),
        (" b.test , a.test ,", "http://a.test/"),
        ("*.a.test", "http://b.a.test/"),
        ("*.A.test", "http://c.b.a.test/"),
        ("a.test:8080", "http://a.test:8080/"),
        ("*.a.test:8080", "http://b.a.test:8080/"),
        ("bücher.test", "http://xn--bcher-kva.test/"),
        ("xn--bcher-kva.test", "http://BÜCHER.test/"),
        ("1.1.1.1", "http://1.1.1.1/"),
        ("[2606:4700:0:0::1111]:81", "http://[2606:4700::1111]:81/"),
    ],
)
def test_a_host_on_the_list_is_allowed(allows: Callable[[str, str], bool], hosts: str, url: str) -> None:
    assert allows(hosts, url)


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ("a.test", "http://b.a.test/"),
        ("a.test", "http://xa.test/"),
        ("a.test", "http://a.test.b/"),
        ("a.test", "http://a/"),
        ("a.test", "http://a.test:8080/"),
        ("a.test:8080", "http://a.test/"),
        ("a.test:80", "https://a.test/"),
        ("*.a.test", "http://a.test/"),
        ("*.a.test", "http://xa.test/"),
        ("*.a.test:8080", "http://b.a.test/"),
        ("*.test", "http://1.1.1.1/"),
        ("a.test", "http://1.1.1.1/"),
        ("1.1.1.1", "http://1.1.1.2/"),
        ("1.1.1.1", "http://[::ffff:1.1.1.1]/"),
        ("bücher.test", "http://bucher.test/"),
    ],
)
def test_a_host_that_is_not_on_the_list_is_not_allowed(
    allows: Callable[[str, str], bool], hosts: str, url: str
) -> None:
    assert not allows(hosts, url)


@pytest.mark.parametrize(
    "hosts",
    [
        *(
            "*",
            "*.",
            "**.a.test",
            "a.*.test",
            "*a.test",
            "*.1.1.1.1",
            "*.[::1]",
            "http://a.test",
            "a.test/x",
            "a.test/",
        ),
        *(
            "a.test b.test",
            "user@a.test",
            "a.test:",
            "a.test:0",
            "a.test:65536",
            "::1",
            "[::1",
            "127.1",
            "10",
            "a..test",
        ),
        *(".a.test", "good.test, -bad.test"),
    ],
)
def test_an_entry_that_is_no_host_is_told(hosts: str) -> None:
    with pytest.raises(ValueError, match=r"^--fetch-hosts: .* is not a host"):
        parse_hosts(hosts)


@pytest.mark.parametrize("hosts", ["", ",", " , "])
def test_a_list_without_a_host_is_told(hosts: str) -> None:
    with pytest.raises(ValueError, match=r"^--fetch-hosts names no host$"):
        parse_hosts(hosts)
