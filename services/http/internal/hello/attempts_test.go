// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hello

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
)

// attempt is a way to pass a rule for allowed.example, *.allowed.example, **.deep.example and "xn--bcher-kva.example"
// without its name.
type attempt struct {
	about string
	bytes []byte
	want  error // nil: the rule allows it
}

func rules(t testing.TB, refuseECH bool, texts ...string) *Rules {
	t.Helper()
	var patterns []dnsname.Pattern
	for _, text := range texts {
		p, err := dnsname.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		patterns = append(patterns, p)
	}
	return &Rules{Names: dnsname.NewSet(patterns), RefuseECH: refuseECH}
}

func attempts() []attempt {
	long := strings.Repeat(strings.Repeat("a", 59)+".", 5)
	allowed := host("allowed.example")
	return []attempt{
		// what rules allow
		{"the exact name", modern(allowed), nil},
		{"mixed case", modern(host("aLLoWed.EXAMPLE")), nil},
		{"one label below", modern(host("a.allowed.example")), nil},
		{"one label below **", modern(host("a.deep.example")), nil},
		{"three labels below **", modern(host("a.b.c.deep.example")), nil},
		{"an internationalised name", modern(host("xn--bcher-kva.example")), nil},
		{"fragments of one byte", split(message(tls13, allowed), 1), nil},
		{"early data behind it", join(modern(allowed, ext{extEarlyData, nil}), rec(typeData, make([]byte, 99))), nil},
		{"domain fronting: the Host of a later request is encrypted", modern(allowed), nil},

		// other names
		{"another name", modern(host("denied.example")), ErrRefused},
		{"two labels below", modern(host("a.b.allowed.example")), ErrRefused},
		{"the name that ** is below", modern(host("deep.example")), ErrRefused},
		{"the name as a prefix", modern(host("allowed.example.denied.example")), ErrRefused},
		{"the name as a suffix", modern(host("notallowed.example")), ErrRefused},
		{"the name as a suffix of a hyphen", modern(host("x-allowed.example")), ErrRefused},
		{"a wildcard in the server name", modern(host("*.allowed.example")), ErrMalformed},
		{"a parent of the name", modern(host("example")), ErrRefused},
		{"no server name", modern(), ErrRefused},
		{"no extensions", rec(typeHandshake, handshake(clientHello, join(u16(0x0303), make([]byte, 32), with8(nil),
			with16([]byte{0, 47}), with8([]byte{0})))), ErrRefused},
		{"the name in ALPN only", modern(ext{extALPN, with16(with8([]byte("allowed.example")))}), ErrRefused},
		{"the name in the session ID only", rec(typeHandshake, handshake(clientHello, join(u16(0x0303), make([]byte, 32),
			with8([]byte("allowed.example")), with16([]byte{0, 47}), with8([]byte{0})))), ErrRefused},
		{"the name in padding only", modern(ext{21, []byte("\x00\x00allowed.example")}), ErrRefused},

		// names that are not DNS names
		{"an IPv4 address", modern(host("192.0.2.1")), ErrMalformed},
		{"an IPv4 address in hexadecimal", modern(host("0xc0.0x0.0x2.0x1")), ErrMalformed},
		{"an IPv4 address as one number", modern(host("3221225985")), ErrMalformed},
		{"a short IPv4 address", modern(host("127.1")), ErrMalformed},
		{"an IPv6 address", modern(host("2001:db8::1")), ErrMalformed},
		{"an IPv6 address in brackets", modern(host("[2001:db8::1]")), ErrMalformed},
		{"a port", modern(host("allowed.example:443")), ErrMalformed},
		{"a trailing dot", modern(host("allowed.example.")), ErrMalformed},
		{"two trailing dots", modern(host("allowed.example..")), ErrMalformed},
		{"a leading dot", modern(host(".allowed.example")), ErrMalformed},
		{"an empty label", modern(host("a..allowed.example")), ErrMalformed},
		{"an embedded NUL", modern(host("denied.example\x00.allowed.example")), ErrMalformed},
		{"a final NUL", modern(host("allowed.example\x00")), ErrMalformed},
		{"a final space", modern(host("allowed.example ")), ErrMalformed},
		{"a line end", modern(host("allowed.example\r\n")), ErrMalformed},
		{"a user", modern(host("denied.example@allowed.example")), ErrMalformed},
		{"a path", modern(host("denied.example/.allowed.example")), ErrMalformed},
		{"an internationalised name in UTF-8", modern(host("bücher.example")), ErrMalformed},
		{"letters of full width", modern(host("ａllowed.example")), ErrMalformed},
		{"the Kelvin sign for k", modern(host("\u212a.allowed.example")), ErrMalformed},
		{"a full stop of CJK", modern(host("a\u3002allowed.example")), ErrMalformed},
		{"percent encoding", modern(host("%61llowed.example")), ErrMalformed},
		{"a name of more than 253 bytes", modern(host(long + "allowed.example")), ErrMalformed},
		{"a label of more than 63 bytes", modern(host(strings.Repeat("a", 64) + ".allowed.example")), ErrMalformed},
		{"an empty name", modern(host("")), ErrMalformed},

		// several names
		{"two extensions", modern(allowed, host("denied.example")), ErrMalformed},
		{"two extensions, the other order", modern(host("denied.example"), allowed), ErrMalformed},
		{"two equal extensions", modern(allowed, allowed), ErrMalformed},
		{"two names", modern(sni(name(0, "allowed.example"), name(0, "denied.example"))), ErrMalformed},
		{"two names, the other order", modern(sni(name(0, "denied.example"), name(0, "allowed.example"))), ErrMalformed},
		{"a name of type 1", modern(sni(name(1, "allowed.example"))), ErrMalformed},
		{"a name of type 1 first", modern(sni(name(1, "denied.example"), name(0, "allowed.example"))), ErrMalformed},
		{"a name of type 255 last", modern(sni(name(0, "allowed.example"), name(255, "denied.example"))), ErrMalformed},
		{"an empty list", modern(sni()), ErrMalformed},
		{"an empty extension", modern(ext{extServerName, nil}), ErrMalformed},
		{
			"bytes behind the list", modern(ext{extServerName, join(with16(name(0, "allowed.example")), []byte{0})}),
			ErrMalformed,
		},
		{"a list that is too long", modern(ext{extServerName, join(u16(99), name(0, "allowed.example"))}), ErrMalformed},
		{
			"a name that is too long", modern(ext{extServerName, with16(join([]byte{0}, u16(99), []byte("allowed.example")))}),
			ErrMalformed,
		},
		{
			"a name that is too short", modern(ext{extServerName, with16(join([]byte{0}, u16(7), []byte("allowed.example")))}),
			ErrMalformed,
		},

		// the message
		{"bytes behind the extensions", rec(typeHandshake, handshake(clientHello,
			append(message(tls13, allowed)[4:], 0))), ErrMalformed},
		{"an extension behind the list", rec(typeHandshake, handshake(clientHello,
			join(message(tls13, allowed)[4:], u16(0), with16(with16(name(0, "denied.example")))))), ErrMalformed},
		{"an extension behind pre_shared_key", modern(ext{extPreSharedKey, make([]byte, 9)}, allowed), ErrMalformed},
		{"odd cipher suites", rec(typeHandshake, handshake(clientHello, join(u16(0x0303), make([]byte, 32), with8(nil),
			with16([]byte{0, 47, 1}), with8([]byte{0}), with16(nil)))), ErrMalformed},
		{"a long session ID", rec(typeHandshake, handshake(clientHello, join(u16(0x0303), make([]byte, 32),
			with8(make([]byte, 33)), with16([]byte{0, 47}), with8([]byte{0}), with16(nil)))), ErrMalformed},
		{"SSLv2 with the name in its challenge", append([]byte{0x80, 46, 1, 3, 1}, "allowed.example"...), ErrMalformed},
		{"SSLv2 before a ClientHello", join([]byte{0x80, 3, 1, 3, 1}, modern(allowed)), ErrMalformed},
		{"version 4 in the message", rec(typeHandshake, handshake(clientHello,
			append([]byte{4, 0}, message(tls13, allowed)[6:]...))), ErrMalformed},
		{
			"another handshake message", rec(typeHandshake, handshake(serverHello, message(tls13, allowed)[4:])),
			ErrMalformed,
		},
		{"a hello request before", join(rec(typeHandshake, handshake(0, nil)), modern(allowed)), ErrMalformed},

		// records
		{"an alert before", join(rec(typeAlert, []byte{1, 0}), modern(allowed)), ErrMalformed},
		{"change_cipher_spec before", join(rec(typeChange, []byte{1}), modern(allowed)), ErrMalformed},
		{"application data before", join(rec(typeData, []byte{1}), modern(allowed)), ErrMalformed},
		{"an empty record before", join(rec(typeHandshake, nil), modern(allowed)), ErrMalformed},
		{"an empty record between", join(split(message(tls13, allowed)[:9], 9), rec(typeHandshake, nil),
			rec(typeHandshake, message(tls13, allowed)[9:])), ErrMalformed},
		{"an alert between", join(split(message(tls13, allowed)[:9], 9), rec(typeAlert, []byte{1, 0}),
			rec(typeHandshake, message(tls13, allowed)[9:])), ErrMalformed},
		{
			"another version between", join(split(message(tls13, allowed)[:9], 9), []byte{typeHandshake, 2, 0, 0, 1, 0}),
			ErrMalformed,
		},
		{"two ClientHellos in a record", rec(typeHandshake, join(message(tls13, allowed),
			message(tls13, host("denied.example")))), ErrMalformed},
		{"two ClientHellos, the allowed one last", rec(typeHandshake, join(message(tls13, host("denied.example")),
			message(tls13, allowed))), ErrMalformed},
		{
			"the second ClientHello begins in the record of the first", join(rec(typeHandshake, join(message(tls13, allowed),
				message(tls13, host("denied.example"))[:9])), rec(typeHandshake, message(tls13, host("denied.example"))[9:])),
			ErrMalformed,
		},
		{
			"an HTTP request with the name", []byte("CONNECT allowed.example:443 HTTP/1.1\r\nHost: allowed.example\r\n\r\n"),
			ErrNotTLS,
		},
		{"a PROXY header before", join([]byte("PROXY TCP4 192.0.2.1 192.0.2.2 1 443\r\n"), modern(allowed)), ErrNotTLS},
		{"more than 16 KiB of padding", modern(ext{21, make([]byte, MaxBytes)}, allowed), ErrTooLarge},
	}
}

func TestAttemptsToPassServerNameRules(t *testing.T) {
	r := rules(t, false, "allowed.example", "*.allowed.example", "**.deep.example", "xn--bcher-kva.example")
	names := map[string]bool{}
	for _, a := range attempts() {
		t.Run(a.about, func(t *testing.T) {
			if names[a.about] {
				t.Error("the name is used twice")
			}
			names[a.about] = true
			for _, n := range []int{1, 13, len(a.bytes)} {
				h, _, err := read(a.bytes, n)
				if err == nil && h == nil {
					t.Fatalf("segments of %d: it is incomplete", n)
				}
				if err == nil {
					if err := compareWithServer(h, a.bytes); err != nil {
						t.Error(err)
					}
					err = r.Check(h)
				}
				if !errors.Is(err, a.want) {
					t.Errorf("segments of %d: %v, want %v", n, err, a.want)
				}
			}
		})
	}
	if len(names) < 60 {
		t.Errorf("only %d attempts", len(names))
	}
}

func TestRulesForEncryptedClientHellos(t *testing.T) {
	for _, number := range encrypted {
		e := ext{number, ech.content}
		for _, c := range []struct {
			name              string
			allowed, allowed2 bool // without and with RefuseECH
		}{{"allowed.example", true, false}, {"denied.example", false, false}} {
			h, _, err := read(modern(host(c.name), e), 100)
			if err != nil || !h.ECH {
				t.Fatalf("%#x: %+v, %v", number, h, err)
			}
			got := rules(t, false, "allowed.example").Check(h) == nil
			got2 := rules(t, true, "allowed.example").Check(h) == nil
			if got != c.allowed || got2 != c.allowed2 {
				t.Errorf("%#x, %s: %v and %v", number, c.name, got, got2)
			}
		}
	}
}

func TestRulesWithoutANameOrAPatternAllowNothing(t *testing.T) {
	unnamed, _, err := read(modern(), 100)
	if err != nil {
		t.Fatal(err)
	}
	if rules(t, false, "*").Check(unnamed) == nil {
		t.Error("a connection without a server name passes a rule for every name")
	}
	named, _, err := read(modern(host("a.example")), 100)
	if err != nil {
		t.Fatal(err)
	}
	if (&Rules{}).Check(named) == nil || rules(t, false).Check(named) == nil {
		t.Error("rules without a pattern allow a name")
	}
	if err := rules(t, false, "*").Check(named); err != nil {
		t.Errorf("a rule for every name: %v", err)
	}
}

func answerOf(random []byte, content int) []byte {
	return rec(typeHandshake, handshake(serverHello, join(u16(0x0303), random, make([]byte, content))))
}

func TestSecondClientHelloShowsTheSameName(t *testing.T) {
	retry, other := answerOf(retryRequest[:], 50), answerOf(bytes.Repeat([]byte{1}, 32), 50)
	change, data := rec(typeChange, []byte{1}), rec(typeData, make([]byte, 300))
	same, differs := modern(host("A.example")), modern(host("b.example"))
	exchange := rec(typeHandshake, handshake(16, make([]byte, 30)))
	tiny := rec(typeHandshake, []byte{1})
	for _, c := range []struct {
		about  string
		early  bool
		answer []byte // before the client's bytes
		client []byte
		done   bool
		err    error
	}{
		{"TLS 1.3 goes on with encrypted data", false, other, join(change, data), true, nil},
		{"TLS 1.2 goes on with its key exchange", false, other, exchange, true, nil},
		{"an encrypted Finished of TLS 1.2 that begins like a ClientHello", false, other, join(change, tiny), true, nil},
		{"the same name", false, retry, join(change, same), true, nil},
		{"another name", false, retry, join(change, differs), false, ErrMalformed},
		{"another name in small records", false, retry, split(differs[recordHeader:], 7), false, ErrMalformed},
		{"another name before the answer", false, nil, differs, false, ErrMalformed},
		{"no name", false, retry, modern(), false, ErrMalformed},
		{"an encrypted name", false, retry, modern(host("a.example"), ech), false, ErrMalformed},
		{"another name after early data", true, retry, join(change, data, data, differs), false, ErrMalformed},
		{"the same name after early data", true, retry, join(data, change, same), true, nil},
		{"early data before the answer", true, nil, join(change, data), false, nil},
		{"early data without its extension", false, nil, data, false, ErrMalformed},
		{"too much early data", true, nil, bytes.Repeat(data, 4000), false, ErrMalformed},
		{"another name after an alert", false, retry, join(rec(typeAlert, []byte{1, 90}), differs), false, ErrMalformed},
		{"many alerts", false, retry, bytes.Repeat(rec(typeAlert, []byte{1, 90}), 17), false, ErrMalformed},
		{"a key exchange before the answer", false, nil, exchange, false, ErrMalformed},
		{"a key exchange after a retry", false, retry, exchange, false, ErrMalformed},
		{"an unknown record", false, retry, rec(99, []byte{1}), false, ErrMalformed},
		{"an empty record", false, retry, rec(typeHandshake, nil), false, ErrMalformed},
		{"an answer in tiny records", false, split(retry[recordHeader:], 9), differs, false, ErrMalformed},
		{"an alert of the server", false, rec(typeAlert, []byte{2, 40}), nil, true, nil},
	} {
		t.Run(c.about, func(t *testing.T) {
			for _, n := range []int{1, 7, 1 << 20} {
				s := NewSecond(&Hello{ServerName: "a.example", EarlyData: c.early})
				done := false
				for part := range slices.Chunk(c.answer, n) {
					done = s.Server(part)
				}
				var err error
				for part := range slices.Chunk(c.client, n) {
					if done, err = s.Client(part); done || err != nil {
						break
					}
				}
				if done != c.done || !errors.Is(err, c.err) {
					t.Errorf("segments of %d: done %v, %v; want %v, %v", n, done, err, c.done, c.err)
				}
			}
		})
	}
}
