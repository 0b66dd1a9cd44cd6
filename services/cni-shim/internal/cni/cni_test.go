// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"

	types100 "github.com/containernetworking/cni/pkg/types/100"
)

var versions = []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// drawn is a random result in JSON, as plugins write them.
func drawn(r *rand.Rand, version string) string {
	pick := func(all ...string) string { return all[r.IntN(len(all))] }
	address := func() string {
		return pick("10.0.0.1/24", "fd00::1/64", "0.0.0.0/0", "::/0", "::ffff:10.0.0.1/120", "192.0.2.255/32", "FD00::A/127")
	}
	gateway := func() string { return pick("", "10.0.0.254", "fe80::1", "::ffff:192.0.2.1", "FE80::B") }
	list := func(most int, f func() string) string {
		var all []string
		for range r.IntN(most + 1) {
			all = append(all, f())
		}
		return "[" + strings.Join(all, ",") + "]"
	}
	parts := []string{fmt.Sprintf(`"cniVersion":%q`, version)}
	maybe := func(key string, f func() string) {
		if r.IntN(4) > 0 {
			parts = append(parts, fmt.Sprintf("%q:%s", key, f()))
		}
	}
	devices := 0
	maybe("interfaces", func() string {
		return list(3, func() string {
			devices++
			return fmt.Sprintf(`{"name":%q,"mac":%q,"sandbox":%q,"mtu":%d,"socketPath":%q,"pciID":%q,"more":[1]}`, pick("eth0", "<&>", ""),
				pick("", "02:00:00:00:00:01"), pick("", "/run/netns/x"), r.IntN(2)*1400, pick("", "/s"), pick("", "0000:00"))
		})
	})
	maybe("ips", func() string {
		return list(3, func() string {
			index := ""
			if devices > 0 && r.IntN(2) > 0 {
				index = fmt.Sprintf(`,"interface":%d`, r.IntN(devices))
			}
			return fmt.Sprintf(`{"version":%q,"address":%q,"gateway":%q%s}`, pick("4", "6", ""), address(), gateway(), index)
		})
	})
	maybe("routes", func() string {
		return list(3, func() string {
			return fmt.Sprintf(`{"dst":%q,"gw":%q,"mtu":%d,"advmss":%d,"priority":%d%s}`, address(), gateway(), r.IntN(2)*9000, r.IntN(2),
				r.IntN(2), pick("", `,"table":0`, `,"table":7,"scope":253`))
		})
	})
	maybe("dns", func() string {
		return pick("{}", `{"nameservers":["192.0.2.53"],"search":[],"domain":"x"}`, `{"options":["a","b"]}`, "null")
	})
	return "{" + strings.Join(parts, ",") + "}"
}

// read decodes a result, without the empty "dns" that libcni writes before 1.0.0.
func read(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	if dns, ok := m["dns"].(map[string]any); ok && len(dns) == 0 {
		delete(m, "dns")
	}
	return m
}

func TestResultsAreWrittenAsLibcniWritesThem(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		from, to := versions[r.IntN(len(versions))], versions[r.IntN(len(versions))]
		text := drawn(r, from)
		lib, err := create.Create(from, []byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		now, err := types100.NewResultFromResult(lib)
		if err != nil {
			t.Fatal(err)
		}
		old, err := now.GetAsVersion(to)
		if err != nil {
			t.Fatal(err)
		}
		var want, got bytes.Buffer
		if err := old.PrintTo(&want); err != nil {
			t.Fatal(err)
		}
		ours, err := ParseResult([]byte(text), "")
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if err := ours.Print(&got, to); err != nil {
			t.Fatal(err)
		}
		if g, w := read(t, got.Bytes()), read(t, want.Bytes()); !reflect.DeepEqual(g, w) {
			t.Fatalf("%s in %s: written as\n%s\nwant\n%s", text, to, got.String(), want.String())
		}
		if strings.HasPrefix(to, "1.") && got.String() != want.String() {
			t.Fatalf("%s in %s: written as\n%s\nwant\n%s", text, to, got.String(), want.String())
		}
	}
}

func TestWhatIsNoResultIsRefused(t *testing.T) {
	for _, text := range []string{
		``, `[]`, `"x"`, `{"cniVersion":"7"}`, `{"cniVersion":"0.2.0"}`, `{"interfaces":[null]}`, `{"ips":[null]}`, `{"routes":[null]}`,
		`{"ips":[{"interface":0}]}`, `{"ips":[{"address":"x"}]}`, `{"ips":[{"address":"10.0.0.1"}]}`, `{"ips":[{"gateway":"fe80::1%x"}]}`,
		`{"interfaces":[{}],"ips":[{"interface":-1}]}`, `{"routes":[{"dst":"fe80::%x/64"}]}`, `{"cniVersion":1}`,
	} {
		if r, err := ParseResult([]byte(text), "1.0.0"); err == nil {
			t.Errorf("%s is read as %+v", text, r)
		}
	}
	if r, err := ParseResult([]byte(`{}`), "1.0.0"); err != nil || r.CNIVersion != "1.0.0" {
		t.Errorf("a result without a version: %+v, %v", r, err)
	}
}

func TestErrorsAreThoseOfLibcni(t *testing.T) {
	for _, e := range []types.Error{{Code: 7, Msg: "x"}, {Code: 11, Msg: "x", Details: "<y>"}} {
		ours := NewError(e.Code, e.Msg, e.Details)
		want, werr := json.Marshal(e)
		got, gerr := json.Marshal(ours)
		if werr != nil || gerr != nil || string(got) != string(want) || ours.Error() != e.Error() {
			t.Errorf("%s, %q; want %s, %q", got, ours, want, e.Error())
		}
	}
	for ours, want := range map[uint]uint{
		ErrIncompatibleVersion: types.ErrIncompatibleCNIVersion, ErrUnsupportedField: types.ErrUnsupportedField,
		ErrInvalidEnvironment: types.ErrInvalidEnvironmentVariables, ErrIOFailure: types.ErrIOFailure,
		ErrDecodingFailure: types.ErrDecodingFailure, ErrInvalidConfig: types.ErrInvalidNetworkConfig,
		ErrTryAgainLater: types.ErrTryAgainLater,
	} {
		if ours != want {
			t.Errorf("code %d, want %d", ours, want)
		}
	}
}

func TestMACsAreReadAsPackageNetReadsThem(t *testing.T) {
	for _, text := range []string{
		"02:11:22:33:44:55", "02-11-22-33-44-FF", "0211.22ab.44FF", "", "zz", "02:11:22:33:44", "02:11:22:33:44:5g", "02:11:22:33:44-55",
		"02:11-22:33:44:55", "0211.2233:4455", "02:11:22:33:44:55:66:77", "2:11:22:33:44:55", "0211:2233:4455", "02 11 22 33 44 55", "０2:11:22:33:44",
	} {
		want, err := net.ParseMAC(text)
		mac, canonical, ok := ParseMAC(text)
		if ok != (err == nil && len(want) == 6) || ok && (canonical != want.String() || !bytes.Equal(mac[:], want)) {
			t.Errorf("%q is %v, %q, %v; want %v, %v", text, mac, canonical, ok, want, err)
		}
	}
}
