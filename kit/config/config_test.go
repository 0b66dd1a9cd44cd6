// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/instance"
)

type storeConfig struct {
	Path    string   `config:"path" help:"where it is"`
	MaxSize ByteSize `config:"maxSize" was:"size" help:"how large it may grow"`
}

func (s *storeConfig) Validate() error {
	var p Problems
	if s.MaxSize == 0 {
		p.Addf("maxSize", "is zero")
	}
	return p.Err()
}

type common struct {
	Verbose bool `config:"verbose"`
}

type testConfig struct {
	Lease   time.Duration     `config:"lease" help:"how long | at most"`
	CIDRs   []netip.Prefix    `config:"podCIDRs"`
	Listen  netip.AddrPort    `config:"listen"`
	Mode    string            `config:"mode" enum:"none,required"`
	Workers uint8             `config:"workers"`
	Offset  int               `config:"offset"`
	Ratio   float64           `config:"ratio"`
	Names   []string          `config:"names"`
	Labels  map[string]string `config:"labels"`
	Token   string            `config:"token" secret:"true"`
	Store   storeConfig       `config:"store"`
	Common  common            `config:",inline"`

	internal int // not configuration
}

func (c *testConfig) Validate() error {
	var p Problems
	if c.Mode == "none" && c.Workers > 10 {
		p.Addf("workers", "%d workers are useless with mode none", c.Workers)
	}
	if c.Lease < 0 {
		p.Addf("lease", "is negative")
	}
	return p.Err()
}

func testDefaults(p instance.Paths) testConfig {
	return testConfig{
		Lease: 2 * time.Minute, Mode: "required", Workers: 4, Listen: netip.MustParseAddrPort("127.0.0.1:80"),
		Store: storeConfig{Path: p.ServiceStateDir("demo"), MaxSize: 1 << 20}, internal: 7,
	}
}

func load(t *testing.T, yaml string, env []string, args ...string) (testConfig, *Effective, error) {
	t.Helper()
	root := t.TempDir()
	if yaml != "" {
		dir := filepath.Join(root, "/etc/sluice")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "demo.yaml"), []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Load(Options{Service: "demo", Args: args, Environ: env, Root: root, Output: &bytes.Buffer{}}, testDefaults)
}

func TestStrongerSourceWins(t *testing.T) {
	yaml := "lease: 1s\nworkers: 1\nmode: none\nstore:\n  maxSize: 2MiB\n"
	env := []string{"SLUICE_DEMO_LEASE=2s", "SLUICE_DEMO_STORE_MAX_SIZE=3MiB", "OTHER=1", "SLUICE_DEMO_PORT=tcp://x"}
	cfg, eff, err := load(t, yaml, env, "--lease=3s", "--verbose", "--instance", "")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Lease != 3*time.Second || cfg.Store.MaxSize != 3<<20 || cfg.Workers != 1 || cfg.Offset != 0 ||
		!cfg.Common.Verbose || cfg.internal != 7 {
		t.Errorf("got %+v", cfg)
	}
	want := map[string]Source{
		"lease": FromFlag, "store.maxSize": FromEnv, "workers": FromFile, "mode": FromFile,
		"offset": FromDefault, "verbose": FromFlag,
	}
	for _, e := range eff.Entries {
		if w, ok := want[e.Key]; ok && e.Source != w {
			t.Errorf("%s comes from %s, want %s", e.Key, e.Source, w)
		}
	}
	if !reflect.DeepEqual(eff.Ignored, []string{"SLUICE_DEMO_PORT"}) {
		t.Errorf("ignored %q", eff.Ignored)
	}
}

func TestEveryTypeIsReadFromEverySource(t *testing.T) {
	want := testDefaults(instance.Paths{})
	want.Lease = 90 * time.Second
	want.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/64")}
	want.Listen = netip.MustParseAddrPort("[::1]:9")
	want.Mode, want.Workers, want.Offset, want.Ratio = "none", 7, -5, 0.25
	want.Names = []string{"a", "b c"}
	want.Labels = map[string]string{"app": "web", "tier": "front"}
	want.Token = "t0k"
	want.Store = storeConfig{Path: "/x", MaxSize: 64 << 20}
	want.Common.Verbose = true

	fromFile, _, err := load(t, `
# a comment
lease: 1m30s
podCIDRs: [10.0.0.0/8, "fd00::/64"]
listen: "[::1]:9"
mode: none
workers: 7
offset: -5
ratio: 0.25
names:
  - a
  - b c
labels: {app: web, tier: front}
token: t0k
store: {path: /x, maxSize: 64 MiB}
verbose: true
`, nil)
	if err != nil || !reflect.DeepEqual(fromFile, want) {
		t.Errorf("file: %+v, %v\nwant %+v", fromFile, err, want)
	}
	fromFlags, _, err := load(t, "", nil, "--lease", "90s", "--pod-cidrs=10.0.0.0/8, fd00::/64", "--listen=[::1]:9",
		"--mode=none",
		"--workers=7", "--offset=-5", "--ratio=.25", "--names=a,b c", "--labels=app=web,tier=front", "--token=t0k",
		"--store-path=/x", "--store-max-size=64MiB", "--verbose=true")
	if err != nil || !reflect.DeepEqual(fromFlags, want) {
		t.Errorf("flags: %+v, %v\nwant %+v", fromFlags, err, want)
	}
	fromEnv, _, err := load(t, "", []string{
		"SLUICE_DEMO_LEASE=1.5m", "SLUICE_DEMO_POD_CIDRS=10.0.0.0/8,fd00::/64", "SLUICE_DEMO_LISTEN=[::1]:9",
		"SLUICE_DEMO_MODE=none", "SLUICE_DEMO_WORKERS=7", "SLUICE_DEMO_OFFSET=-5", "SLUICE_DEMO_RATIO=0.25",
		"SLUICE_DEMO_NAMES=a,b c",
		"SLUICE_DEMO_LABELS=app=web,tier=front", "SLUICE_DEMO_TOKEN=t0k", "SLUICE_DEMO_STORE_PATH=/x",
		"SLUICE_DEMO_STORE_MAX_SIZE=67108864", "SLUICE_DEMO_VERBOSE=true",
	})
	if err != nil || !reflect.DeepEqual(fromEnv, want) {
		t.Errorf("environment: %+v, %v\nwant %+v", fromEnv, err, want)
	}
	cleared, _, err := load(t, "names: [x]\n", nil, "--names=")
	if err != nil || len(cleared.Names) != 0 {
		t.Errorf("an empty list clears: %q, %v", cleared.Names, err)
	}
}

// keyedError is an error of a package that does not import this one.
type keyedError struct{ error }

func (keyedError) Key() string     { return "label" }
func (k keyedError) Unwrap() error { return k.error }

type keyedGroup struct {
	Label string `config:"label"`
}

func (keyedGroup) Validate() error { return keyedError{errors.New("must name a label")} }

func TestErrorsWithAKeyGetTheKeyOfTheirGroup(t *testing.T) {
	var c struct {
		Group keyedGroup `config:"group"`
	}
	errs := validate(&c)
	if len(errs) != 1 || errs[0].Error() != "group.label: must name a label" {
		t.Errorf("the errors are %v", errs)
	}
}

func TestAllProblemsAreReportedAtOnceWithTheirPlace(t *testing.T) {
	_, _, err := load(t, `lease: soon
podCIDRs: [10.0.0.0/8, 10.0.0.0/99]
lease: 5s
Mode: none
store:
  maxSize: -1
  pth: red
store.path: /x
names: lonely
token:
labels: {a: [1], b: 2, b: 3}
offset: 99999999999999999999
verbose: yes
`, []string{"SLUICE_DEMO_WORKERS=300", "SLUICE_DEMO_LABELS=novalue"}, "--mode=maybe", "--listen=here")
	var got []string
	for _, e := range All(err) {
		var p *Problem
		if !errors.As(e, &p) {
			t.Errorf("%v is not a *Problem", e)
			continue
		}
		got = append(got, filepath.Base(p.Where)+" "+p.Key+": "+p.Err.Error())
	}
	want := []string{
		`demo.yaml:1 lease: "soon" is not a duration`,
		`demo.yaml:2 podCIDRs[1]: "10.0.0.0/99" is not a valid CIDR`,
		`demo.yaml:3 lease: duplicate key; it is in line 1 already`,
		`demo.yaml:4 Mode: unknown key; did you mean mode?`,
		`demo.yaml:6 store.maxSize: "-1" is not a valid size`,
		`demo.yaml:7 store.pth: unknown key; did you mean store.path?`,
		`demo.yaml:8 store.path: unknown key; write groups as nested keys`,
		`demo.yaml:9 names: want a list, got "lonely"`,
		`demo.yaml:10 token: has no value`,
		`demo.yaml:11 labels.a: want one value, got a list`,
		`demo.yaml:11 labels.b: duplicate key`,
		`demo.yaml:12 offset: 99999999999999999999 is out of the range of int`,
		`demo.yaml:13 verbose: "yes" is neither true nor false`,
		`SLUICE_DEMO_WORKERS workers: 300 is out of the range of uint8`,
		`SLUICE_DEMO_LABELS labels: "novalue" is not name=value`,
		`--mode mode: "maybe" is not one of none, required`,
		`--listen listen: "here" is not a valid IP address and port`,
	}
	for _, w := range want {
		found := false
		for _, g := range got {
			found = found || strings.HasPrefix(g, w)
		}
		if !found {
			t.Errorf("missing: %s", w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d problems, want %d:\n%s", len(got), len(want), strings.Join(got, "\n"))
	}
}

func TestRenamedSettingIsRefusedWithItsNewName(t *testing.T) {
	_, _, err := load(t, "store:\n  size: 1MiB\n", []string{"SLUICE_DEMO_STORE_SIZE=2MiB"}, "--store-size", "3MiB")
	var got []string
	for _, e := range All(err) {
		got = append(got, filepath.Base(e.Error()))
	}
	want := []string{
		"demo.yaml:2: store.size: was renamed to store.maxSize",
		"SLUICE_DEMO_STORE_SIZE: store.size: was renamed to SLUICE_DEMO_STORE_MAX_SIZE",
		"--store-size: store.size: was renamed to --store-max-size",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestContradictionsAreReportedWithTheirGroup(t *testing.T) {
	_, _, err := load(t, "mode: none\nworkers: 11\nlease: -1s\nstore: {maxSize: 0}\n", nil)
	want := "store.maxSize: is zero\nworkers: 11 workers are useless with mode none\nlease: is negative"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestFileIsOptionalUnlessNamed(t *testing.T) {
	if _, eff, err := load(t, "", nil); err != nil || eff.File != "" {
		t.Errorf("no file: %v", err)
	}
	if _, _, err := load(t, "", nil, "--config=/nonexistent/x.yaml"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a named file that is missing: %v", err)
	}
	for _, empty := range []string{"# only a comment\n", "---\n", "null\n", "\xef\xbb\xbfmode: none\n"} {
		if _, _, err := load(t, empty, nil); err != nil {
			t.Errorf("file %q: %v", empty, err)
		}
	}
	for _, bad := range []string{
		"- a\n", "text\n", "a: b: c\n", "mode: none\n---\nmode: none\n",
		"mode: &x none\ntoken: *x\n", "<<: {mode: none}\n", strings.Repeat("# x\n", MaxFileSize/4+1),
	} {
		if _, _, err := load(t, bad, nil); err == nil {
			t.Errorf("file %.40q was accepted", bad)
		}
	}
}

func TestFileThatOthersCouldChangeIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "demo.yaml")
	if err := os.WriteFile(path, []byte("lease: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if os.Getegid() == 0 { // group-writable by the group of root is allowed
		if err := os.Chown(path, -1, 65700); err != nil {
			t.Fatal(err)
		}
	}
	for mode, ok := range map[os.FileMode]bool{
		0o600: true, 0o644: true, 0o440: true, 0o664: false, 0o646: false,
		0o622: false,
	} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		_, _, err := load(t, "", nil, "--config", path)
		if ok && err != nil || !ok && (err == nil || !strings.Contains(err.Error(), path) ||
			!strings.Contains(err.Error(), "chmod go-w")) {
			t.Errorf("mode %#o: %v, want accepted: %v", mode, err, ok)
		}
	}
}

func TestKernelFileOfAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	path := filepath.Join(t.TempDir(), "demo.yaml")
	if err := os.WriteFile(path, []byte("lease: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(path, 65702, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, err := load(t, "", nil, "--config", path); err == nil ||
		!strings.Contains(err.Error(), "belongs to uid 65702") {
		t.Errorf("got %v, want the owner refused", err)
	}
}

func TestInstanceMovesFileAndDefaults(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "/etc/sluice-blue")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "demo.yaml"), []byte("workers: 9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, env []string }{
		{[]string{"--instance=blue"}, nil},
		{[]string{"-instance", "blue"}, nil},
		{nil, []string{"SLUICE_DEMO_INSTANCE=blue"}},
	} {
		cfg, eff, err := Load(Options{Service: "demo", Args: c.args, Environ: c.env, Root: root}, testDefaults)
		if err != nil || cfg.Workers != 9 || cfg.Store.Path != filepath.Join(root, "/var/lib/sluice-blue/demo") ||
			eff.Paths.Name != "blue" {
			t.Errorf("%v: workers %d, path %s, %v", c, cfg.Workers, cfg.Store.Path, err)
		}
	}
	if _, _, err := Load(Options{Service: "demo", Args: []string{"--instance=../x"}, Root: root},
		testDefaults); !errors.Is(err, instance.ErrName) {
		t.Errorf("a bad instance name: %v", err)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"--nonsense"}, {"stray"}, {"--workers"}, {"--", "x"}} {
		if _, _, err := load(t, "", nil, args...); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}

func TestPrintedConfigurationGivesTheSameConfiguration(t *testing.T) {
	args := []string{
		"--pod-cidrs=10.0.0.0/8,fd00::/64", "--labels=a=1,b=true", "--mode=none", "--lease=1h",
		"--names=null,x: y",
	}
	want, _, err := load(t, "", nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	_, _, err = Load(Options{
		Service: "demo", Args: append(args, "--print-config", "--token=hidden"), Output: &out,
		Root: t.TempDir(),
	}, testDefaults)
	if !errors.Is(err, ErrPrinted) || strings.Contains(out.String(), "hidden") ||
		!strings.Contains(out.String(), "# flag\nlease: 1h0m0s") {
		t.Fatalf("%v, printed:\n%s", err, out.String())
	}
	got, _, err := load(t, out.String(), nil)
	want.Store.Path, got.Store.Path = "", "" // the two temporary roots differ
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read back: %+v, %v\nwant %+v\nfrom:\n%s", got, err, want, out.String())
	}
}

func TestHelpVersionAndReferenceComeFromTheStruct(t *testing.T) {
	var out bytes.Buffer
	_, _, err := Load(Options{Service: "demo", Args: []string{"--help"}, Output: &out}, testDefaults)
	if !errors.Is(err, ErrHelp) || !strings.Contains(out.String(), "--store-max-size") ||
		!strings.Contains(out.String(), "[1MiB]") || !strings.Contains(out.String(), "/etc/sluice/demo.yaml") {
		t.Errorf("%v, help:\n%s", err, out.String())
	}
	out.Reset()
	if _, _, err := Load(Options{Service: "demo", Args: []string{"--version"}, Output: &out, Version: "v9"},
		testDefaults); !errors.Is(err, ErrPrinted) || out.String() != "v9\n" {
		t.Errorf("%v, version %q", err, out.String())
	}
	md, err := Markdown("demo", testDefaults)
	if err != nil || !strings.Contains(md,
		"| `lease` | `--lease` | `SLUICE_DEMO_LEASE` | `2m0s` | how long \\| at most |") ||
		!strings.Contains(md, "(one of none, required)") || strings.Count(md, "\n") != 2+13 {
		t.Errorf("%v, reference:\n%s", err, md)
	}
}

// TestVariablesThatNoSettingHasAreWarnedOf checks that a misspelt variable causes a warning and
// that variables injected by Kubernetes do not.
func TestVariablesThatNoSettingHasAreWarnedOf(t *testing.T) {
	env := []string{
		"SLUICE_DEMO_LEASES=2s", "SLUICE_DEMO_SERVICE_HOST=10.0.0.1", "SLUICE_DEMO_SERVICE_PORT=80",
		"SLUICE_DEMO_PORT=tcp://x", "SLUICE_DEMO_SERVICE_PORT_HTTP=80", "SLUICE_DEMO_PORT_80_TCP=tcp://x",
		"SLUICE_DEMO_PORT_80_TCP_ADDR=10.0.0.1",
	}
	for _, test := range []struct {
		env  []string
		want bool
	}{{env, true}, {env[1:], false}} {
		_, eff, err := load(t, "", test.env)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		eff.Log(t.Context(), slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
		got := out.String()
		if strings.Contains(got, `"variables":["SLUICE_DEMO_LEASES"]`) != test.want || !test.want && got != "" {
			t.Errorf("%q: logged %q", test.env, got)
		}
	}
}

func TestSecretsAreNotLogged(t *testing.T) {
	_, eff, err := load(t, "token: hunter2\n", nil)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	eff.Log(t.Context(), slog.New(slog.NewJSONHandler(&out, nil)))
	if s := out.String(); strings.Contains(s, "hunter2") || !strings.Contains(s,
		`"token":{"value":"(secret)","source":"file"}`) {
		t.Errorf("logged %s", s)
	}
}

func TestMistakesInTheStructAreFound(t *testing.T) {
	check := func(name string, err error) {
		if err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	type clash struct {
		A string `config:"aB"`
		B string `config:"a-b"`
	}
	type reserved struct {
		A string `config:"config"`
	}
	type hidden struct {
		a string `config:"a"`
	}
	type dotted struct {
		A string `config:"a.b"`
	}
	type channel struct {
		A chan int `config:"a"`
	}
	type nested struct {
		A [][]string `config:"a"`
	}
	_ = hidden{a: ""}
	for name, v := range map[string]any{
		"clash": &clash{}, "reserved": &reserved{}, "hidden": &hidden{},
		"dotted": &dotted{}, "channel": &channel{}, "nested": &nested{},
	} {
		_, err := fieldsOf(v)
		check(name, err)
	}
	_, _, err := Load(Options{Service: "No Good"}, testDefaults)
	check("bad service name", err)
}

func TestByteSizeTextIsReadBack(t *testing.T) {
	for text, want := range map[string]ByteSize{
		"0": 0, "7B": 7, "1KiB": 1024, "1 kB": 1000, "3GB": 3e9, "2TiB": 2 << 40,
		"1536": 1536,
	} {
		var b, again ByteSize
		if err := b.UnmarshalText([]byte(text)); err != nil || b != want {
			t.Errorf("%q = %d, %v; want %d", text, b, err, want)
		}
		if err := again.UnmarshalText([]byte(b.String())); err != nil || again != b {
			t.Errorf("%d prints as %q, which reads as %d, %v", b, b, again, err)
		}
	}
	for _, bad := range []string{"", "x", "-1", "1.5GiB", "9223372036854775807KiB", "1PB"} {
		if err := new(ByteSize).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestKeysBecomeFlags(t *testing.T) {
	for key, want := range map[string]string{
		"lease": "lease", "podCIDRs": "pod-cidrs", "store.maxSize": "store-max-size",
		"IPv4": "ipv4", "useBPF": "use-bpf",
	} {
		if got := kebab(key); got != want {
			t.Errorf("kebab(%q) = %q, want %q", key, got, want)
		}
	}
}

func FuzzFileIsReadOrRefusedWithItsPlace(f *testing.F) {
	for _, s := range []string{
		"lease: 1s\n", "store: {path: x}\n", "labels:\n  a: b\n", "podCIDRs: [1.2.3.0/24]\n",
		"a: &a [*a]\n", "? [x]\n: y\n", "!!binary x: y", "{{{{", "workers: !!str 5",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg := testDefaults(instance.Paths{})
		before := cfg
		fields, err := fieldsOf(&cfg)
		if err != nil {
			t.Fatal(err)
		}
		errs := applyYAML("f.yaml", data, fields)
		for _, err := range errs {
			var p *Problem
			if !errors.As(err, &p) || !strings.HasPrefix(p.Where, "f.yaml") {
				t.Fatalf("problem without a place: %v", err)
			}
		}
		touched := false
		for _, f := range fields {
			touched = touched || f.source == FromFile
		}
		if !touched && !reflect.DeepEqual(cfg, before) {
			t.Fatalf("no key was set, yet the configuration changed: %+v", cfg)
		}
	})
}
