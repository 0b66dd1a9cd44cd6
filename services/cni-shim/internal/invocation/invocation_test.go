// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
)

func env(more ...string) func(string) string {
	m := map[string]string{EnvContainerID: "c1", EnvIfName: "eth0", EnvNetns: "/run/netns/x"}
	for i := 0; i < len(more); i += 2 {
		m[more[i]] = more[i+1]
	}
	return func(k string) string { return m[k] }
}

func doc(more string) string {
	if more != "" {
		more = "," + more
	}
	return `{"cniVersion":"1.0.0","name":"sluice","type":"sluice-cni"` + more + `}`
}

// code is the CNI code of an error, 0 of none.
func code(t *testing.T, err error) uint {
	t.Helper()
	if err == nil {
		return 0
	}
	var e *cni.Error
	if !errors.As(err, &e) {
		t.Fatalf("%v is not a CNI error", err)
	}
	return e.Code
}

func TestDefaultsAndOwnKeys(t *testing.T) {
	in, err := Parse(Add, env(), []byte(doc("")))
	if err != nil {
		t.Fatal(err)
	}
	c := in.Config
	if c.RunDir != "/run/sluice" || c.StateDir != "/var/lib/sluice" || c.LogFile != DefaultLogFile || c.Timeout != 30*time.Second || c.MTU != 0 {
		t.Errorf("defaults %+v", c)
	}
	in, err = Parse(Add, env(), []byte(doc(`"runDir":"/tmp/x/run/sluice-b","mtu":9000,"logFile":"","timeout":"5s",
		"capabilities":{"labels":true,"bandwidth":false},"ipMasq":false,"ipam":{},"args":{"other":{"x":1},"cni":{"labels":[]}},"cni.dev/anything":1,"disableGC":true`)))
	if err != nil {
		t.Fatal(err)
	}
	c = in.Config
	if c.StateDir != "/tmp/x/var/lib/sluice-b" || c.LogFile != "" || c.Timeout != 5*time.Second || c.MTU != 9000 {
		t.Errorf("configured %+v", c)
	}
}

// TestHostileInputHasTheRightCode proves INV-42 and INV-3.
func TestHostileInputHasTheRightCode(t *testing.T) {
	deep := strings.Repeat(`[`, 100_000)
	for name, c := range map[string]struct {
		stdin string
		want  uint
	}{
		"empty":                        {"", 6},
		"blank":                        {" \n", 6},
		"not JSON":                     {"{", 6},
		"null":                         {"null", 6},
		"a list":                       {"[]", 6},
		"a string":                     {`"x"`, 6},
		"more behind it":               {doc("") + "{}", 6},
		"deep":                         {deep, 6},
		"deep inside":                  {doc(`"args":` + strings.Repeat(`{"a":`, 40) + "1" + strings.Repeat("}", 40)), 6},
		"oversize":                     {doc(`"args":{"x":"` + strings.Repeat("x", MaxStdin) + `"}`), 6},
		"not UTF-8":                    {doc("\"args\":\"\xff\""), 6},
		"a key twice":                  {doc(`"mtu":1500,"mtu":9000`), 6},
		"a key twice inside":           {doc(`"args":{"cni":{},"cni":{}}`), 6},
		"no version":                   {`{"name":"x"}`, 1},
		"a version of the past":        {`{"cniVersion":"0.2.0","name":"x"}`, 1},
		"a version of the future":      {`{"cniVersion":"9.0.0","name":"x"}`, 1},
		"an invalid version":           {`{"cniVersion":"1","name":"x"}`, 1},
		"the version is a number":      {`{"cniVersion":1,"name":"x"}`, 7},
		"no name":                      {`{"cniVersion":"1.0.0"}`, 7},
		"a bad name":                   {`{"cniVersion":"1.0.0","name":"../x"}`, 7},
		"unknown key":                  {doc(`"mtuu":1`), 2},
		"a key in another case":        {doc(`"MTU":1500`), 2},
		"mtu is text":                  {doc(`"mtu":"1500"`), 7},
		"mtu is negative":              {doc(`"mtu":-1`), 7},
		"mtu is small":                 {doc(`"mtu":576`), 7},
		"mtu is large":                 {doc(`"mtu":65536`), 7},
		"mtu is beyond 64 bits":        {doc(`"mtu":1e400`), 7},
		"runDir is relative":           {doc(`"runDir":"run/sluice"`), 7},
		"runDir climbs":                {doc(`"runDir":"/run/../etc/run/x"`), 7},
		"runDir without a state":       {doc(`"runDir":"/tmp/x"`), 7},
		"runDir has a NUL":             {doc(`"runDir":"/run/a\u0000b"`), 7},
		"logFile is relative":          {doc(`"logFile":"x"`), 7},
		"timeout is a number":          {doc(`"timeout":30`), 7},
		"timeout is none":              {doc(`"timeout":"soon"`), 7},
		"timeout is short":             {doc(`"timeout":"1ms"`), 7},
		"timeout is long":              {doc(`"timeout":"24h"`), 7},
		"another IPAM":                 {doc(`"ipam":{"type":"host-local"}`), 2},
		"masquerade":                   {doc(`"ipMasq":true`), 2},
		"a capability we lack":         {doc(`"capabilities":{"bandwidth":true}`), 2},
		"a request for what we lack":   {doc(`"runtimeConfig":{"bandwidth":{"ingressRate":1}}`), 2},
		"capabilities is a list":       {doc(`"capabilities":["ips"]`), 7},
		"labels is an object":          {doc(`"runtimeConfig":{"labels":{"app":"x"}}`), 7},
		"a label without key":          {doc(`"runtimeConfig":{"labels":[{"value":"x"}]}`), 7},
		"a reserved label":             {doc(`"runtimeConfig":{"labels":[{"key":"reserved:host","value":""}]}`), 7},
		"a generated label":            {doc(`"args":{"cni":{"labels":[{"key":"generated:x","value":""}]}}`), 7},
		"a label with a source":        {doc(`"args":{"cni":{"labels":[{"key":"k8s:app","value":""}]}}`), 7},
		"a label of two values":        {doc(`"args":{"cni":{"labels":[{"key":"a","value":"1"},{"key":"a","value":"2"}]}}`), 7},
		"a label with a NUL":           {doc(`"args":{"cni":{"labels":[{"key":"a","value":"\u0000"}]}}`), 7},
		"a long label":                 {doc(`"args":{"cni":{"labels":[{"key":"` + strings.Repeat("a", 64) + `"}]}}`), 7},
		"too many labels":              {doc(`"args":{"cni":{"labels":[` + strings.Repeat(`{"key":"a"},`, 1024) + `{"key":"a"}]}}`), 7},
		"labelsFromArgs is a list":     {doc(`"labelsFromArgs":["A"]`), 7},
		"a label from no argument":     {doc(`"labelsFromArgs":{"job":""}`), 7},
		"a derived label from one":     {doc(`"labelsFromArgs":{"io.kubernetes.pod.namespace":"A"}`), 7},
		"a reserved label from one":    {doc(`"labelsFromArgs":{"reserved:host":"A"}`), 7},
		"an invalid annotation":        {doc(`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"sluice.io/labels":"app"}}`), 7},
		"annotations are text":         {doc(`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":"app"}`), 7},
		"an invalid address":           {doc(`"runtimeConfig":{"ips":["10.0.0"]}`), 7},
		"an invalid prefix length":     {doc(`"runtimeConfig":{"ips":["10.0.0.1/33"]}`), 7},
		"two of a family":              {doc(`"runtimeConfig":{"ips":["10.0.0.1","10.0.0.2"]}`), 7},
		"an address with a zone":       {doc(`"runtimeConfig":{"ips":["fe80::1%eth0"]}`), 7},
		"a multicast address":          {doc(`"args":{"cni":{"ips":["224.0.0.1"]}}`), 7},
		"addresses in both places":     {doc(`"runtimeConfig":{"ips":["10.0.0.1"]},"args":{"cni":{"ips":["fd00::1"]}}`), 7},
		"an invalid MAC":               {doc(`"runtimeConfig":{"mac":"zz"}`), 7},
		"a group's MAC":                {doc(`"runtimeConfig":{"mac":"01:00:5e:00:00:01"}`), 7},
		"no MAC":                       {doc(`"runtimeConfig":{"mac":"00:00:00:00:00:00"}`), 7},
		"a MAC of eight bytes":         {doc(`"runtimeConfig":{"mac":"02:00:00:00:00:00:00:01"}`), 7},
		"an invalid name server":       {doc(`"dns":{"nameservers":["ns"]}`), 7},
		"dns is text":                  {doc(`"dns":"1.1.1.1"`), 7},
		"prevResult is text":           {doc(`"prevResult":"x"`), 7},
		"prevResult of another world":  {doc(`"prevResult":{"cniVersion":"7"}`), 7},
		"an interface that is null":    {doc(`"prevResult":{"interfaces":[null]}`), 7},
		"an address that is null":      {doc(`"prevResult":{"ips":[null]}`), 7},
		"a route that is null":         {doc(`"prevResult":{"routes":[null]}`), 7},
		"an interface that is not":     {doc(`"prevResult":{"ips":[{"address":"10.0.0.1/24","interface":3}]}`), 7},
		"an interface below zero":      {doc(`"prevResult":{"ips":[{"address":"10.0.0.1/24","interface":-1}]}`), 7},
		"an address in words":          {doc(`"prevResult":{"ips":[{"address":"localhost"}]}`), 7},
		"everything that is allowed":   {doc(`"mtu":1500`), 0},
		"null is the same as not said": {doc(`"mtu":null,"runtimeConfig":null,"prevResult":null,"args":null`), 0},
	} {
		in, err := Parse(Add, env(), []byte(c.stdin))
		if got := code(t, err); got != c.want {
			t.Errorf("%s: code %d (%v), want %d; %+v", name, got, err, c.want, in)
		}
		if err != nil && len(err.Error()) > 500 {
			t.Errorf("%s: the answer repeats the input: %d bytes", name, len(err.Error()))
		}
	}
}

// TestUnsupportedFieldsAreNamedWithTheirValue: CNI wants the key and the value of an unsupported field in the message.
func TestUnsupportedFieldsAreNamedWithTheirValue(t *testing.T) {
	for more, want := range map[string][2]string{
		`"mtuu":1500`:                             {"mtuu", "1500"},
		`"ipMasq":true`:                           {"ipMasq", "true"},
		`"ipam":{"type":"host-local"}`:            {"ipam", "host-local"},
		`"capabilities":{"bandwidth":true}`:       {"capabilities.bandwidth", "true"},
		`"runtimeConfig":{"bandwidth":{"x":1}}`:   {"runtimeConfig.bandwidth", `{"x":1}`},
		`"x":"` + strings.Repeat("y", 1000) + `"`: {"x", "yyy"},
	} {
		_, err := Parse(Add, env(), []byte(doc(more)))
		if code(t, err) != 2 || !strings.Contains(err.Error(), want[0]) || !strings.Contains(err.Error(), want[1]) || len(err.Error()) > 500 {
			t.Errorf("%.60s: %v, want code 2 with %q", more, err, want)
		}
	}
}

func TestHostileEnvironmentIsCode4(t *testing.T) {
	for name, e := range map[string]func(string) string{
		"no id":              env(EnvContainerID, ""),
		"an id that climbs":  env(EnvContainerID, "../x"),
		"an id with a slash": env(EnvContainerID, "a/b"),
		"a long id":          env(EnvContainerID, strings.Repeat("a", 129)),
		"an id with a NUL":   env(EnvContainerID, "a\x00b"),
		"no name":            env(EnvIfName, ""),
		"a long name":        env(EnvIfName, "abcdefghijklmnop"),
		"a name that climbs": env(EnvIfName, ".."),
		"a pattern":          env(EnvIfName, "eth%d"),
		"a name with space":  env(EnvIfName, "eth 0"),
		"a sysctl directory": env(EnvIfName, "all"),
		"a name with a NUL":  env(EnvIfName, "a\x00"),
		"a name in bytes":    env(EnvIfName, "\xff"),
		"no namespace":       env(EnvNetns, ""),
		"a relative one":     env(EnvNetns, "x"),
		"a namespace, NUL":   env(EnvNetns, "/run/\x00"),
		"no pair":            env(EnvArgs, "x"),
		"an unknown key":     env(EnvArgs, "FOO=1"),
		"unknown, said no":   env(EnvArgs, "IgnoreUnknown=0;FOO=1"),
		"a key twice":        env(EnvArgs, "IgnoreUnknown=1;A=1;A=2"),
		"not a truth":        env(EnvArgs, "IgnoreUnknown=perhaps"),
		"a bad namespace":    env(EnvArgs, "K8S_POD_NAMESPACE=a/b"),
		"a bad pod":          env(EnvArgs, "K8S_POD_NAME=a/b"),
		"long args":          env(EnvArgs, "IgnoreUnknown=1;A="+strings.Repeat("x", 70_000)),
		"args in bytes":      env(EnvArgs, "IgnoreUnknown=1;A=\xff"),
	} {
		if _, err := Parse(Add, e, []byte(doc(""))); code(t, err) != 4 {
			t.Errorf("%s: %v, want code 4", name, err)
		}
	}
	for _, verb := range []string{"", "add", "ADDX", strings.Repeat("A", 1000)} {
		if _, err := ParseCommand(env(EnvCommand, verb)); code(t, err) != 4 {
			t.Errorf("command %q: %v, want code 4", verb, err)
		}
	}
}

func TestDelNeedsLittle(t *testing.T) {
	e := env(EnvNetns, "", EnvArgs, "nonsense")
	for _, more := range []string{
		"", `"unknown":1`, `"prevResult":[]`, `"ipam":{"type":"x"}`, `"runtimeConfig":{"ips":["x"]}`,
		`"mtu":100`, `"mtu":"1500"`, `"dns":7`, `"capabilities":{"bandwidth":true}`, `"runtimeConfig":{"portMappings":7}`,
	} {
		in, err := Parse(Del, e, []byte(doc(more)))
		if err != nil || len(in.Config.Ignored) > 0 {
			t.Errorf("%s: %v; ignored %q", more, err, in.Config.Ignored)
		}
	}
}

// TestDelAndGCIgnoreWhatTheyDoNotNeed: a mistake of an operator in the configuration must not keep existing containers
// from being removed.
func TestDelAndGCIgnoreWhatTheyDoNotNeed(t *testing.T) {
	list := `,"cni.dev/valid-attachments":[]`
	for more, field := range map[string]string{
		`"timeout":"30"`: "timeout", `"timeout":30`: "timeout", `"timeout":"1ms"`: "timeout",
		`"logFile":"x"`: "logFile", `"logFile":7`: "logFile", `"logFile":"/etc/passwd"`: "logFile",
	} {
		for _, verb := range []Command{Del, GC} {
			in, err := Parse(verb, env(EnvNetns, ""), []byte(strings.Replace(doc(more+list), `"1.0.0"`, `"1.1.0"`, 1)))
			if err != nil || len(in.Config.Ignored) != 1 || !strings.Contains(in.Config.Ignored[0], field) {
				t.Errorf("%s, %s: %v; ignored %q, want one about %s", verb, more, err, in.Config.Ignored, field)
				continue
			}
			if in.Config.Timeout != DefaultTimeout || field == "logFile" && in.Config.LogFile != "" {
				t.Errorf("%s, %s: timeout %s, logFile %q", verb, more, in.Config.Timeout, in.Config.LogFile)
			}
		}
		for _, verb := range []Command{Add, Check, Status} {
			if _, err := Parse(verb, env(), []byte(strings.Replace(doc(more), `"1.0.0"`, `"1.1.0"`, 1))); code(t, err) != 7 {
				t.Errorf("%s, %s: %v, want code 7", verb, more, err)
			}
		}
	}
	if _, err := Parse(Del, env(), []byte(`{"cniVersion":"1.0.0","type":"sluice-cni"}`)); err != nil {
		t.Errorf("DEL without a name: %v", err)
	}
	for _, more := range []string{`"runDir":"run"`, `"runDir":7`, `"stateDir":"x"`, `"runDir":"/tmp/x"`} {
		if _, err := Parse(Del, env(), []byte(doc(more))); code(t, err) != 7 {
			t.Errorf("DEL with %s: %v, want code 7: it needs these", more, err)
		}
	}
}

func TestLogFileIsTakenWhereLogsBelong(t *testing.T) {
	for path, ok := range map[string]bool{
		"/var/log/sluice/cni.log":             true,
		"/var/log/sluice-b/x/cni.log":         true,
		"/run/sluice/log/cni.log":             true,
		"/var/lib/sluice/cni.log":             true,
		"/var/log/sluice":                     false,
		"/var/log/sluice.d/x":                 false,
		"/var/log/cni.log":                    false,
		"/var/log/sluicex/../other/x":         false,
		"/etc/passwd":                         false,
		"/etc/cron.d/x":                       false,
		"/run/sluice":                         false,
		"/run/sluiced/x":                      false,
		"/var/lib/kubelet/x":                  false,
		"/tmp/x":                              false,
		"/tmp/root/var/log/sluice/cni.log":    false,
		"/etc/ssh/sshd_config":                false,
		"/var/log/sluice/../../../etc/passwd": false,
	} {
		_, err := Parse(Add, env(), []byte(doc(fmt.Sprintf(`"logFile":%q`, path))))
		if err != nil && !isInstance(filepath.Base(filepath.Dir(path))) { // what is none of Sluice's makes no place for logs
			_, other := Parse(Add, env(), []byte(doc(fmt.Sprintf(`"runDir":"/","stateDir":%q,"logFile":%q`, filepath.Dir(path), path))))
			if code(t, other) != 7 {
				t.Errorf("%s below runDir / and stateDir %s: %v", path, filepath.Dir(path), other)
			}
		}
		if ok != (err == nil) || !ok && !strings.Contains(err.Error(), "logFile") {
			t.Errorf("%s: %v, want it taken %v", path, err, ok)
		}
	}
}

func TestLabelsHaveTheirSourceAndOrder(t *testing.T) {
	body := doc(`"runtimeConfig":{"labels":[{"key":"b","value":"2"},{"key":"example.com/a","value":""}],
		"io.kubernetes.cri.pod-annotations":{"sluice.io/labels":" app = web ,,b=2,"}},"args":{"cni":{"labels":[{"key":"b","value":"2"}]}}`)
	for args, want := range map[string][]label.Label{
		"": {{Source: "cni", Key: "app", Value: "web"}, {Source: "cni", Key: "b", Value: "2"}, {Source: "cni", Key: "example.com/a", Value: ""}},
		"IgnoreUnknown=true;K8S_POD_NAMESPACE=ns;X=1": {
			{Source: "k8s", Key: "app", Value: "web"},
			{Source: "k8s", Key: "b", Value: "2"},
			{Source: "k8s", Key: "example.com/a", Value: ""},
			{Source: "k8s", Key: "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", Value: "ns"},
			{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "ns"},
		},
	} {
		in, err := Parse(Add, env(EnvArgs, args), []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(in.Labels, want) {
			t.Errorf("args %q: labels %v, want %v", args, in.Labels, want)
		}
	}
}

// TestLabelsFromArgsAreThereOrADDFails: a policy that selects by such a label
// would not select a container without it.
func TestLabelsFromArgsAreThereOrADDFails(t *testing.T) {
	body := doc(`"labelsFromArgs":{"job":"NOMAD_JOB_ID","example.com/group":"NOMAD_GROUP_NAME"},
		"args":{"cni":{"labels":[{"key":"job","value":"web/1"}]}}`)
	args := "IgnoreUnknown=true;NOMAD_JOB_ID=web/1;NOMAD_GROUP_NAME=cache;NOMAD_REGION=global"
	in, err := Parse(Add, env(EnvArgs, args), []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	want := []label.Label{
		{Source: "cni", Key: "example.com/group", Value: "cache"},
		{Source: "cni", Key: "job", Value: "web/1"},
	}
	if !slices.Equal(in.Labels, want) {
		t.Errorf("labels %v, want %v", in.Labels, want)
	}
	for args, c := range map[string]struct {
		code uint
		says string
	}{
		"IgnoreUnknown=1;NOMAD_GROUP_NAME=cache":               {4, "NOMAD_JOB_ID"},
		"IgnoreUnknown=1;NOMAD_JOB_ID=web/1;NOMAD_GROUP_NAME=": {4, "NOMAD_GROUP_NAME"},
		"": {4, "NOMAD_GROUP_NAME"},
		"IgnoreUnknown=1;NOMAD_JOB_ID=other;NOMAD_GROUP_NAME=cache": {7, `"web/1" and "other"`},
		"IgnoreUnknown=1;NOMAD_JOB_ID=web/1;NOMAD_GROUP_NAME=\x01;": {4, "CNI_ARGS"},
	} {
		_, err := Parse(Add, env(EnvArgs, args), []byte(body))
		if code(t, err) != c.code || !strings.Contains(err.Error(), c.says) {
			t.Errorf("args %q: %v, want code %d and %q", args, err, c.code, c.says)
		}
	}
	// CHECK and DEL change no labels, and need no arguments for them.
	if _, err := Parse(Del, env(), []byte(body)); err != nil {
		t.Errorf("DEL: %v", err)
	}
}

// TestDerivedLabelsCannotBeSet: labels that Kubernetes derives for a pod are never taken from the pod, even with the
// right value. They are refused under the source "cni", too, because a selector without a source matches it.
func TestDerivedLabelsCannotBeSet(t *testing.T) {
	for _, key := range []string{
		"io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.pod.uid",
		"io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", "io.cilium.k8s.namespace.labels.team",
		"io.cilium.k8s.policy.serviceaccount", "io.cilium.k8s.policy.cluster", "io.cilium.k8s.named-ports",
	} {
		for place, body := range map[string]string{
			"runtimeConfig.labels": `"runtimeConfig":{"labels":[{"key":"app","value":"x"},{"key":"` + key + `","value":"ns"}]}`,
			"args.cni.labels":      `"args":{"cni":{"labels":[{"key":"` + key + `","value":"ns"}]}}`,
			"runtimeConfig.io.kubernetes.cri.pod-annotations.sluice.io/labels": `"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"sluice.io/labels":"app=x,` + key + `=ns"}}`,
		} {
			for _, args := range []string{"", "K8S_POD_NAMESPACE=ns"} {
				_, err := Parse(Add, env(EnvArgs, args), []byte(doc(body)))
				if code(t, err) != 7 || !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), key) {
					t.Errorf("%s in %s, args %q: %v, want code 7 with the key and its place", key, place, args, err)
				}
			}
		}
	}
	for _, key := range []string{"io.kubernetes", "io.cilium.k8s", "app.kubernetes.io/name", "kubernetes.io/x", "example.io/kubernetes.pod"} {
		if _, err := Parse(Add, env(), []byte(doc(`"args":{"cni":{"labels":[{"key":"`+key+`","value":""}]}}`))); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// FuzzParse: any input results in either a CNI error or an invocation with the properties on which the verbs rely.
func FuzzParse(f *testing.F) {
	f.Add("ADD", "c1", "eth0", "/run/netns/x", "IgnoreUnknown=1;K8S_POD_NAMESPACE=a", []byte(doc(`"mtu":1500,"runtimeConfig":{"ips":["10.0.0.1/24"],"mac":"02:00:00:00:00:01","labels":[{"key":"a","value":"b"}]}`)))
	f.Add("CHECK", "c1", "eth0", "/x", "", []byte(doc(`"prevResult":{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.0.0.1/24"}]}`)))
	f.Add("GC", "", "", "", "", []byte(`{"cniVersion":"1.1.0","name":"x","cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}]}`))
	f.Add("DEL", "c", "e", "", ";;=", []byte("[[[["))
	f.Fuzz(func(t *testing.T, verb, id, ifname, ns, args string, stdin []byte) {
		e := env(EnvCommand, verb, EnvContainerID, id, EnvIfName, ifname, EnvNetns, ns, EnvArgs, args)
		command, err := ParseCommand(e)
		if err != nil || command == Version {
			return
		}
		in, err := Parse(command, e, stdin)
		if err != nil {
			if c := code(t, err); !slices.Contains([]uint{1, 2, 4, 6, 7}, c) {
				t.Fatalf("code %d: %v", c, err)
			}
			return
		}
		if !slices.Contains(Versions, in.Config.CNIVersion) {
			t.Fatalf("version %q", in.Config.CNIVersion)
		}
		for _, dir := range []string{in.Config.RunDir, in.Config.StateDir} {
			if checkDir(dir) != "" {
				t.Fatalf("directory %q", dir)
			}
		}
		if command == Add || command == Del || command == Check {
			if checkContainerID(in.Owner.ContainerID) != "" || checkInterfaceName(in.Owner.Interface) != "" {
				t.Fatalf("owner %q", in.Owner)
			}
		}
		if len(in.Config.Addresses) > 2 || len(in.Labels) > maxRuntimeLabels {
			t.Fatalf("%d addresses, %d labels", len(in.Config.Addresses), len(in.Labels))
		}
		for i, l := range in.Labels {
			if l.Source != label.SourceCNI && l.Source != label.SourceKubernetes {
				t.Fatalf("label %v", l)
			}
			if i > 0 && in.Labels[i-1].Key >= l.Key {
				t.Fatalf("labels are not sorted: %v", in.Labels)
			}
		}
		if p := in.Config.PrevResult; p != nil {
			for _, ip := range p.IPs {
				if ip.Interface != nil && *ip.Interface >= len(p.Interfaces) {
					t.Fatalf("interface %d of %d", *ip.Interface, len(p.Interfaces))
				}
			}
		}
	})
}

func FuzzArgs(f *testing.F) {
	f.Add("IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b")
	f.Add(";;a=b=c;")
	f.Fuzz(func(t *testing.T, s string) {
		args, err := parseArgs(s)
		if err != nil {
			if c := code(t, err); c != 4 {
				t.Fatalf("code %d", c)
			}
			return
		}
		for k, v := range args {
			if k == "" || strings.ContainsAny(k, ";=") || strings.Contains(v, ";") {
				t.Fatalf("pair %q=%q", k, v)
			}
		}
		// An accepted invocation is accepted again.
		var b strings.Builder
		for k, v := range args {
			fmt.Fprintf(&b, "%s=%s;", k, v)
		}
		again, err := parseArgs(b.String())
		if err != nil || len(again) != len(args) {
			t.Fatalf("%q: %v, %v", b.String(), again, err)
		}
	})
}

// TestNamesFollowTheirPatterns: the hand-written loops accept exactly the names that the patterns of the API accept.
func TestNamesFollowTheirPatterns(t *testing.T) {
	name := regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)
	label := regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	const letters = "aZ0_.-/ é"
	var try func(s string, left int)
	try = func(s string, left int) {
		if got, want := isName(s), name.MatchString(s); got != want {
			t.Errorf("isName(%q) = %v, want %v", s, got, want)
		}
		if got, want := isDNSName(s, "-", 63), label.MatchString(s); got != want {
			t.Errorf("isDNSName(%q) = %v, want %v", s, got, want)
		}
		if left > 0 {
			for _, r := range letters {
				try(s+string(r), left-1)
			}
		}
	}
	try("", 4)
	for n := 60; n < 66; n++ {
		s := strings.Repeat("a", n)
		if got, want := isDNSName(s, "-", 63), label.MatchString(s); got != want {
			t.Errorf("isDNSName of %d bytes = %v, want %v", n, got, want)
		}
	}
}

func TestShippedConfigurationIsTaken(t *testing.T) {
	b, err := os.ReadFile("../../../../deploy/cni/10-sluice.conflist")
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		CNIVersion string           `json:"cniVersion"`
		Name       string           `json:"name"`
		Plugins    []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	one := list.Plugins[0]
	one["cniVersion"], one["name"] = list.CNIVersion, list.Name
	if b, err = json.Marshal(one); err != nil {
		t.Fatal(err)
	}
	in, err := Parse(Add, env(), b)
	if err != nil {
		t.Fatal(err)
	}
	defaults, err := Parse(Add, env(), []byte(doc("")))
	if err != nil {
		t.Fatal(err)
	}
	// It spells out the defaults for the reader.
	if !reflect.DeepEqual(in.Config, defaults.Config) {
		t.Errorf("shipped %+v, default %+v", in.Config, defaults.Config)
	}
}

func TestInputThatIsNoObjectIsCalledByItsKind(t *testing.T) {
	for input, kind := range map[string]string{`[]`: "array", `"x"`: "string", `7`: "number", `true`: "bool"} {
		_, err := object([]byte(input))
		if want := "want an object, have: " + kind; err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %q", input, err, want)
		}
	}
}
