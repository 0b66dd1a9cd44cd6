// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package report

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
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
		"a line of YAML":          "user: root\npassword: " + private + "\nport: 1\n",
		"a password with signs":   "password=a,b$c\\d" + private + "\n",
		"words in quotes":         `level=info password="my ` + private + `" token='a ` + private + `'`,
		"blanks around the sign":  `api key = ` + private,
		"a quote in quotes":       `password="it's ` + private + `"`,
		"a map that Go prints":    `map[user:x password:` + private + `]`,
		"a field that Go prints":  `{User:root Password:` + private + ` Port:1}`,
		"an argument of two":      `exec etcdctl --password ` + private + ` get x`,
		"a key of a cloud":        `AWS_SECRET_ACCESS_KEY=` + private,
		"a header of its own":     "> Authorization: Custom a " + private + "\n> Accept: x",
		"a cookie":                "set-cookie: a=b; session=" + private + "; Path=/\n",
		"a line in JSON":          `{"msg":"retry with password: ` + private + ` now"} {`,
		"an attribute":            `level=INFO msg=x password="a \"` + private + `" y=z`,
		"an attribute, quoted":    `x password='` + private + `'`,
		"an attribute in JSON":    `{"msg":"x token=\"` + private + `\" y"}`,
		"a line of YAML, deeper":  "a: 1\n  etcd.password: '" + private + "'\nb: 2",
		"a header of a cookie":    "Cookie: a=" + private,
		"a header in a list":      `{"headers":["X-Token: ` + private + `"]}`,
		"an argument behind":      `sluice-identity --etcd-password ` + private + ` --x`,
		"arguments":               `{"args":["--etcd-password","` + private + `","--x"]}`,
		"a key with a password": "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00-11\n\n" +
			private + "\n-----END RSA PRIVATE KEY-----\n",
		"a key with a password in JSON": `{"a":"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n` + private +
			`\n-----END RSA PRIVATE KEY-----\n"}`,
		"an access key":          `{"secretAccessKey":"` + private + `"}`,
		"JSON that is cut":       `{"env":{"name":"A_TOKEN","value":"` + private + `"}}` + "\n" + `{"env":{"na`,
		"JSON between two lines": "begin\n" + `{"name":"A_TOKEN","value":"` + private + `"}` + "\nend\n",
		"the second of two":      "{\"a\":1}\n{\"token\":\"" + private + "\"}\n",
	} {
		got := string(Output([]byte(text)))
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
		"tokens: 3, secrets: 4, keys: 5, tokenRef: a, the token\nis: new",
		"token:\n  path: /x\npassword=\nuser=x\n",
		`level=info keyspace=12 monkey=2 token-bucket full, -token-`,
		"read a/tokens: no such file\nthen {\n{ and [\n",
		"line\n{\"a\":1}\nline\n",
		"[1,2\n[3]\n",
		"",
	} {
		if got := string(Output([]byte(text))); got != text {
			t.Errorf("%s\nbecomes %s", text, got)
		}
	}
	// A number in the middle of a text is not a secret, but the number value of a secret's name is.
	if got := string(Output([]byte(`{"tokens":5,"token":5}`))); got != `{"token":"REDACTED","tokens":5}`+"\n" {
		t.Errorf("numbers: %s", got)
	}
	got := string(Output([]byte(`{"metadata":{"managedFields":[{"manager":"x"}],"name":"y"}}`)))
	if strings.Contains(got, "manager") || !strings.Contains(got, `"name":"y"`) {
		t.Errorf("managed fields: %s", got)
	}
}

// newArchive returns an archive that is closed at the end of the test.
func newArchive(t *testing.T, limit int64) *Archive {
	t.Helper()
	a, err := New(time.Unix(1e9, 0).UTC(), limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// write writes an archive into a directory of the test.
func write(t *testing.T, a *Archive) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "report.tar.gz")
	target, err := Open(file, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(target.Write(a, "report"), target.Discard()); err != nil {
		t.Fatal(err)
	}
	return file
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

// exit is the exit code of a command.
type exit int

func (e exit) Error() string { return fmt.Sprintf("x (exit code %d)", int(e)) }
func (e exit) ExitCode() int { return int(e) }

var errNoAnswer = errors.New("no answer")

func TestArchiveSaysWhatIsMissing(t *testing.T) {
	for _, limit := range []int64{0, 1 << 20} { // in a directory, and in memory
		saysWhatIsMissing(t, newArchive(t, limit))
	}
}

func saysWhatIsMissing(t *testing.T, a *Archive) {
	t.Helper()
	a.Keep("nodes/b/status.json", "sluice status", []byte(`{"ready":false}`), exit(3))
	a.Keep("nodes/a/status.json", "sluice status", nil, errNoAnswer)
	a.Keep("nodes/a/logs/cni.log", "kubectl logs", []byte("begin of a log"), errNoAnswer)
	a.Keep("cluster/pods.json", "kubectl get pods", []byte(`{"items":[]}`), nil)
	file := write(t, a)
	names, files := contents(t, file)
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
	if got := files["report/nodes/a/logs/cni.log"]; got != "begin of a log" {
		t.Errorf("a log is %q", got)
	}
	var out, errOut bytes.Buffer
	inv := &invocation.Invocation{Format: "table", Out: &out, ErrOut: &errOut}
	if err := Show(inv, file, a.Manifest(), "3 files"); err != nil || out.String() != file+": 3 files\n" {
		t.Errorf("printed %s, %v", out.String(), err)
	}
	if !strings.Contains(errOut.String(), "missing: nodes/a/status.json: no answer\n") ||
		strings.Contains(errOut.String(), "nodes/b/status.json") {
		t.Errorf("printed %s", errOut.String())
	}
	left, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(left) != 1 {
		t.Errorf("the directory of the archive also has %v, %v", left, err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the archive is %v, %v", info, err)
	}
}

func TestReportsOfTheSameAnswersAreTheSame(t *testing.T) {
	var archives [][]byte
	answers := []string{"nodes/a/status.json", "nodes/b/status.json", "cluster/pods.json"}
	for range 2 {
		a := newArchive(t, 0)
		slices.Reverse(answers) // parts arrive in any order
		for _, name := range answers {
			a.Keep(name, "x", []byte(`{}`), nil)
		}
		content, err := os.ReadFile(write(t, a))
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
	a := newArchive(t, 0)
	a.Keep("a.json", "x", []byte(`{}`), nil)
	if err := os.Remove(filepath.Join(a.dir, "a.json")); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	target, err := Open(filepath.Join(dir, "x"), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := target.Write(a, "report"); err == nil {
		t.Error("the archive was written")
	}
	if err := target.Discard(); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("there is %v, %v", left, err)
	}
}

// TestOnlyARegularFileIsReplaced: root may write to a directory in which other users create links.
func TestOnlyARegularFileIsReplaced(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	link, dangling := filepath.Join(dir, "link"), filepath.Join(dir, "dangling")
	if err := errors.Join(os.Symlink(other, link), os.Symlink(filepath.Join(dir, "none"), dangling)); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{
		link, dangling, dir, "/dev/null", filepath.Join(dir, "no", "such"), filepath.Join(other, "x"),
	} {
		if _, err := Open(file, nil, false); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v, want an error that names it", file, err)
		}
	}
	if content, err := os.ReadFile(other); err != nil || string(content) != "precious" {
		t.Errorf("behind the link there is %q, %v", content, err)
	}
	// A file of another kind is not replaced without force, even if it is created during the collection.
	if _, err := Open(other, nil, false); err == nil || !strings.Contains(err.Error(),
		other+": it exists and is not a gzip archive") {
		t.Errorf("a file of another kind: %v", err)
	}
	late := filepath.Join(dir, "late")
	target, err := Open(late, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(late, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := target.Write(newArchive(t, 0), "report"); err == nil || !strings.Contains(err.Error(),
		"is not a gzip archive") {
		t.Errorf("a file that came meanwhile: %v", err)
	}
	if content, err := os.ReadFile(late); err != nil || string(content) != "precious" {
		t.Errorf("the file that came meanwhile has %q, %v", content, err)
	}
	if err := errors.Join(target.Discard(), os.Remove(late)); err != nil {
		t.Error(err)
	}
	for _, force := range []bool{true, false} { // the second one replaces an archive
		target, err := Open(other, nil, force)
		if err != nil {
			t.Fatal(err)
		}
		if err := target.Write(newArchive(t, 0), "report"); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(other); err != nil || info.Mode() != 0o600 {
			t.Errorf("what replaces a file that all may read is %v, %v", info, err)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 3 {
		t.Errorf("there is %v, %v", left, err)
	}
}

func TestReportsAreBounded(t *testing.T) {
	a := newArchive(t, 100)
	a.Keep("a.txt", "x", bytes.Repeat([]byte("x"), 80), nil)
	a.Keep("b.txt", "x", bytes.Repeat([]byte("x"), 30), nil)
	a.Keep("c.txt", "x", bytes.Repeat([]byte("x"), 20), nil)
	m := a.Manifest()
	if len(m.Files) != 2 || len(m.Missing) != 1 || m.Missing[0].Name != "b.txt" {
		t.Errorf("got %+v", m)
	}
	large := newArchive(t, 0)
	large.Keep("a.txt", "x", bytes.Repeat([]byte("x"), FileLimit+1), nil)
	if e := large.Manifest().Files[0]; e.Bytes != FileLimit || !e.Truncated {
		t.Errorf("a large file is %+v", e)
	}
}

// TestAFileTalksToNoTerminal: control characters in labels, container names and logs are escaped.
func TestAFileTalksToNoTerminal(t *testing.T) {
	for text, want := range map[string]string{
		"a\x1b[2Jb\r\n\tc\u009b1m\xffd\u00e4": `a\u001b[2Jb\u000d` + "\n\tc" + `\u009b1m\xffd` + "\u00e4",
		"{\"a\":\"\u009b\U000e0001\"}\n":      `{"a":"\u009b\udb40\udc01"}` + "\n",
		"{\"a\":\"\\u001b\"}\n":               `{"a":"\u001b"}` + "\n",
	} {
		if got := string(Output([]byte(text))); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

func TestNamesOfTheAPILeadNowhereElse(t *testing.T) {
	for name, want := range map[string]string{
		"node1": "node1", "../../etc": "_.._etc", "a/b": "a_b", ".": "",
	} {
		if got := FileName(name); got != want {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
}
