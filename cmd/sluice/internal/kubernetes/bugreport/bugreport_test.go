// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

// private is in every secret of the tests.
const private = "hunter2"

func TestSecretsAreReplaced(t *testing.T) {
	for name, text := range map[string]string{
		"the user of a URL":       `dial https://root:` + private + `@10.0.0.1:2379: refused`,
		"a user without password": `https://` + private + `@10.0.0.1`,
		"one of several URLs":     `"etcdEndpoints":"http://a:1,http://root:` + private + `@b:1"`,
		"a header":                `Authorization: Bearer ` + private + private,
		"a token":                 `token eyJhbGciOiJSUzI1NiJ9.eyJ` + private + `.` + private + ` was refused`,
		"an argument":             `--etcd-password=` + private + ` --x`,
		"a setting":               `SLUICE_IDENTITY_ETCD_TOKEN=` + private,
		"JSON in a log":           `2026-11-27T10:00:00Z {"msg":"x","password":"` + private + `"} {`,
		"JSON in JSON in a log":   `last-applied: {\"clientSecret\":\"` + private + `\",\"a\":1} {`,
		"a key":                   "-----BEGIN EC PRIVATE KEY-----\n" + private + "\n-----END EC PRIVATE KEY-----\n",
		"half of a key":           "-----BEGIN PRIVATE KEY-----\n" + private,
		"a member":                `{"metadata":{"annotations":{"bearerToken":"` + private + `"}}}`,
		"members of a list":       `{"passwords":["x"],"password":["` + private + `"]}`,
		"a variable":              `{"env":[{"name":"ETCD_PASSWORD","value":"` + private + `"}]}`,
		"an annotation":           `{"a":"{\"kind\":\"X\",\"password\":\"` + private + `\"}"}`,
		"the second of two":       "{\"a\":1}\n{\"token\":\"" + private + "\"}\n",
	} {
		got := string(redactOutput([]byte(text)))
		if strings.Contains(got, private) || !strings.Contains(got, redacted) {
			t.Errorf("%s: %s\nbecomes %s", name, text, got)
		}
	}
}

func TestWhatIsNoSecretStays(t *testing.T) {
	for _, text := range []string{
		`dial https://10.0.0.1:2379: refused, see https://a.example/b?mail=x@y`,
		`{"automountServiceAccountToken":false,"imagePullSecrets":[{"name":"registry"}],"secretName":"registry"}` + "\n",
		"{\"serviceAccountToken\":{\"expirationSeconds\":3607,\"path\":\"token\"}}\n",
		"{\n  \"a\": [\n    1\n  ]\n}\n",
		"{\"a\":1}\n{\"b\":18446744073709551615}\n",
		"half {\"a\":",
		`the policy of token-service selects no pod`,
		"",
	} {
		if got := string(redactOutput([]byte(text))); got != text {
			t.Errorf("%s\nbecomes %s", text, got)
		}
	}
	got := string(redactOutput([]byte(`{"metadata":{"managedFields":[{"manager":"x"}],"name":"y"}}`)))
	if strings.Contains(got, "manager") || !strings.Contains(got, `"name":"y"`) {
		t.Errorf("managed fields: %s", got)
	}
}

// newReport is one whose files lie in a directory of the test.
func newReport(t *testing.T, out io.Writer) *report {
	t.Helper()
	return &report{
		inv: &invocation.Invocation{Format: "table", Out: out}, file: filepath.Join(t.TempDir(), "report.tar.gz"),
		spool:    spool{dir: t.TempDir()},
		manifest: manifest{Created: time.Unix(1e9, 0).UTC(), Nodes: []string{"a"}},
	}
}

// contents reads an archive.
func contents(t *testing.T, file string) (names []string, files map[string]string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	compressed, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	files = map[string]string{}
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names, files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		names, files[header.Name] = append(names, header.Name), string(text)
	}
}

func TestArchiveSaysWhatIsMissing(t *testing.T) {
	var out bytes.Buffer
	r := newReport(t, &out)
	r.keep("nodes/b/status.json", "sluice status", []byte(`{"ready":false}`), &kubectl.Error{Code: 3, Text: "x"})
	r.keep("nodes/a/status.json", "sluice status", nil, kubectl.ErrNoAnswer)
	r.keep("nodes/a/logs/cni.log", "kubectl logs", []byte("begin of a log"), kubectl.ErrNoAnswer)
	r.keep("cluster/pods.json", "kubectl get pods", []byte(`{"items":[]}`), nil)
	if err := r.finish("report"); !errors.Is(err, invocation.ErrReported) {
		t.Errorf("got %v, want that something is missing", err)
	}
	names, files := contents(t, r.file)
	if want := []string{
		"report/cluster/pods.json", "report/manifest.json", "report/nodes/a/logs/cni.log", "report/nodes/b/status.json",
	}; !slices.Equal(names, want) {
		t.Errorf("the archive has %q, want %q", names, want)
	}
	for _, want := range []string{
		`"name": "nodes/a/status.json"`, `"reason": "no answer"`, `"reason": "incomplete: no answer"`,
		`"error": "x (exit code 3)"`,
	} {
		if !strings.Contains(files["report/manifest.json"], want) {
			t.Errorf("no %s in %s", want, files["report/manifest.json"])
		}
	}
	if !strings.Contains(out.String(), "missing: nodes/a/status.json: no answer\n") ||
		strings.Contains(out.String(), "nodes/b/status.json") {
		t.Errorf("printed %s", out.String())
	}
	left, err := os.ReadDir(filepath.Dir(r.file))
	if err != nil || len(left) != 1 {
		t.Errorf("beside the archive there is %v, %v", left, err)
	}
}

func TestReportsOfTheSameAnswersAreTheSame(t *testing.T) {
	var archives [][]byte
	answers := []string{"nodes/a/status.json", "nodes/b/status.json", "cluster/pods.json"}
	for range 2 {
		r := newReport(t, io.Discard)
		slices.Reverse(answers) // nodes answer in any order
		for _, name := range answers {
			r.keep(name, "x", []byte(`{}`), nil)
		}
		if err := r.finish("report"); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(r.file)
		if err != nil {
			t.Fatal(err)
		}
		archives = append(archives, content)
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the order of the answers shows in the archive")
	}
}

func TestAnArchiveThatCannotBeWrittenLeavesNothing(t *testing.T) {
	r := newReport(t, io.Discard)
	r.keep("a.json", "x", []byte(`{}`), nil)
	if err := os.Remove(filepath.Join(r.spool.dir, "a.json")); err != nil {
		t.Fatal(err)
	}
	if err := r.finish("report"); err == nil {
		t.Error("the archive was written")
	}
	left, err := os.ReadDir(filepath.Dir(r.file))
	if err != nil || len(left) != 0 {
		t.Errorf("there is %v, %v", left, err)
	}
}

func TestNamesOfTheAPILeadNowhereElse(t *testing.T) {
	for name, want := range map[string]string{
		"node1": "node1", "../../etc": "_.._etc", "a/b": "a_b", ".": "",
	} {
		if got := fileName(name); got != want {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
}
