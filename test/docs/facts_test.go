// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package docs

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// rows returns the rows of the first table below a heading, by their first cell.
func rows(t *testing.T, path, heading string) map[string][]string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(content), "\n"+heading+"\n")
	if !found {
		t.Fatalf("%s has no heading %q", path, heading)
	}
	out := make(map[string][]string)
	for line := range strings.Lines(section) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			if len(out) > 0 {
				break
			}
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		out[cells[0]] = append(out[cells[0]], strings.Join(cells[1:], " | "))
	}
	return out
}

// code returns the Go code below a directory, without tests and without the named directories of code that contain
// nothing else.
func code(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	for _, name := range packages(t, dir) {
		if !slices.Contains(strings.Split(name, "/"), "test") {
			b.WriteString(direct(t, dir+"/"+name))
		}
	}
	return b.String()
}

// TestProcessesCallAsTheArchitectureSays compares the table of processes with the gRPC clients of each process, and
// the users in the table with sysusers.d.
func TestProcessesCallAsTheArchitectureSays(t *testing.T) {
	users, err := os.ReadFile(filepath.Join(root, "deploy/sysusers.d/sluice.conf"))
	if err != nil {
		t.Fatal(err)
	}
	clients := map[string]string{
		"NewIPAMServiceClient(": "ipam", "NewIdentityServiceClient(": "identity", "NewClusterServiceClient(": "identity",
		"NewPolicyServiceClient(": "policy", "NewLoadBalancerServiceClient(": "loadbalancer",
		"NewDatapathServiceClient(": "datapath", "NewObserverServiceClient(": "datapath",
		`"go.etcd.io/etcd/client/v3"`:         "etcd",
		`"github.com/sluice-net/sluice/kube"`: "the Kubernetes API",
	}
	processes := rows(t, "docs/architecture.md", "## Processes and rights")
	for _, service := range []string{
		"identity", "ipam", "policy", "loadbalancer", "controller", "hubble", "store", "datapath", "dns",
	} {
		row := strings.Join(processes["`sluice-"+service+"`"], " ")
		if row == "" {
			t.Errorf("sluice-%s is not in the table of processes", service)
			continue
		}
		cells := strings.Split(row, " | ")
		calls, source := cells[len(cells)-1], code(t, "services/"+service)
		if strings.Contains(source, `"github.com/sluice-net/sluice/proxy/`) { // what the proxies have in common
			source += code(t, "proxy")
		}
		if service == "store" {
			// It serves etcd and uses constants of the client's package; it has no client.
			source = strings.ReplaceAll(source, `"go.etcd.io/etcd/client/v3"`, "")
		}
		for client, of := range clients {
			if has, says := strings.Contains(source, client), strings.Contains(calls, of); has && !says && of != service {
				t.Errorf("sluice-%s calls %s, and the table says %q", service, of, calls)
			}
		}
		for _, of := range slices.Compact(slices.Sorted(maps.Values(clients))) {
			used := false
			for client, x := range clients {
				used = used || x == of && strings.Contains(source, client)
			}
			if !used && strings.Contains(calls, of) {
				t.Errorf("the table says that sluice-%s calls %s, and it has no client of it", service, of)
			}
		}
		name := service
		if service == "controller" {
			name = "status" // name of earlier versions
		}
		user := regexp.MustCompile(`(?m)^u sluice-` + name + ` +(\d+:\d+) `).FindStringSubmatch(string(users))
		if user == nil || !strings.HasPrefix(cells[0], user[1]) {
			t.Errorf("sluice-%s runs as %v, and the table says %s", service, user, cells[0])
		}
	}
}

// TestProcessesHaveTheCapabilitiesThatTheArchitectureSays compares the capabilities in the table of processes with
// the capabilities that main.go keeps.
func TestProcessesHaveTheCapabilitiesThatTheArchitectureSays(t *testing.T) {
	processes := rows(t, "docs/architecture.md", "## Processes and rights")
	for _, service := range []string{
		"identity", "ipam", "policy", "loadbalancer", "controller", "hubble", "store", "datapath", "dns",
	} {
		cells := strings.Split(strings.Join(processes["`sluice-"+service+"`"], " "), " | ")
		source, want := direct(t, "services/"+service), "none"
		if strings.Contains(source, "process.Privileged(") {
			_, list, _ := strings.Cut(source, "var capabilities = []privilege.Cap{")
			list, _, _ = strings.Cut(list, "}")
			want = strings.ReplaceAll(list, "unix.CAP_", "")
		}
		if got, _, _ := strings.Cut(cells[1], " ("); got != want {
			t.Errorf("sluice-%s keeps the capabilities %s, and the table says %s", service, want, got)
		}
	}
}

// TestMapsHaveTheOwnersThatTheDocumentsSay compares the table of packages with maps with the packages of the datapath
// that open maps, and with the maps that each of them opens.
func TestMapsHaveTheOwnersThatTheDocumentsSay(t *testing.T) {
	const dir = "services/datapath/internal"
	generated, err := os.ReadFile(filepath.Join(root, dir, "bpf/maps_bpfel.go"))
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]string)
	for _, m := range regexp.MustCompile(`(MapsMapSl\w+) += "(sl_\w+)"`).FindAllStringSubmatch(string(generated), -1) {
		names[m[1]] = m[2]
	}
	if len(names) < 50 {
		t.Fatalf("the programs have %d maps", len(names))
	}
	table := rows(t, "docs/reference/maps.md", "## Maps and their packages")
	opened := regexp.MustCompile(`\.(?:Map|Memory)\(bpf\.(MapsMapSl\w+)`)
	for _, name := range packages(t, dir) {
		row := strings.Join(table["`"+name+"`"], " ")
		for _, m := range opened.FindAllStringSubmatch(direct(t, dir+"/"+name), -1) {
			if name != "kernel" && !strings.Contains(row, "`"+names[m[1]]+"`") {
				t.Errorf("%s/%s opens %s, and its row in docs/reference/maps.md lacks it: %q", dir, name, names[m[1]], row)
			}
		}
		delete(table, "`"+name+"`")
	}
	for name := range table {
		if strings.Contains(name, "/") {
			t.Errorf("docs/reference/maps.md has a row for %s, and there is no such package below %s", name, dir)
		}
	}
	content, err := os.ReadFile(filepath.Join(root, "docs/reference/maps.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(content), "\n## Maps and their packages\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, name := range slices.Sorted(maps.Values(names)) {
		if !strings.Contains(section, "`"+name+"`") && !strings.HasPrefix(name, "sl_prev") {
			t.Errorf("docs/reference/maps.md does not say who writes %s", name)
		}
	}
}

// TestUsesOfTheDeviceOfArrivalAreListed compares the table of functions that use the device of arrival of a packet with
// the programs.
func TestUsesOfTheDeviceOfArrivalAreListed(t *testing.T) {
	table := rows(t, "docs/reference/marks.md", "## Device of arrival at egress hooks")
	users := regexp.MustCompile(
		`ingress_ifindex|\b(?:is_copied|is_forwarded|entered_by|is_from_pod|is_of_unknown_origin)\(`)
	name := regexp.MustCompile(`(\w+)\(`)
	for _, pattern := range []string{"bpf/*.c", "bpf/include/sluice/*.h"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %v", pattern, files, err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			// a function: its heading, a brace at the beginning of a line, and the body up to the next such
			// brace
			for _, f := range strings.Split(string(content), "\n}\n") {
				heading, body, ok := strings.Cut(f, "\n{\n")
				if !ok || !users.MatchString(body) {
					continue
				}
				heading = heading[max(strings.LastIndex(heading, "\n\n"), strings.LastIndex(heading, "*/\n"), 0):]
				m := name.FindStringSubmatch(heading)
				if m == nil {
					t.Errorf("%s: a function without a name: %q", file, heading)
					continue
				}
				if row := "`" + m[1] + "`"; table[row] == nil {
					t.Errorf("docs/reference/marks.md has no row for %s of %s", row, file)
				} else {
					table[row] = []string{}
				}
			}
		}
	}
	for row, cells := range table {
		if strings.HasPrefix(row, "`") && len(cells) > 0 {
			t.Errorf("docs/reference/marks.md has a row for %s, which does not use the device of arrival", row)
		}
	}
}

// direct returns the Go code of one package, without tests.
func direct(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		content, err := os.ReadFile(path) //nolint:gosec // a file of the repository
		if err != nil {
			t.Fatal(err)
		}
		b.Write(content)
	}
	return b.String()
}

// packages returns the directories below dir that contain Go files, relative to dir.
func packages(t *testing.T, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		name, err := filepath.Rel(filepath.Join(root, dir), filepath.Dir(path))
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestSubjectsOfTheDatapathImportWhatTheArchitectureSays compares the table of subjects with the directories of the
// datapath and the imports of their packages. Package kernel may open all maps and programs; every other package may
// import what the row of its directory allows.
func TestSubjectsOfTheDatapathImportWhatTheArchitectureSays(t *testing.T) {
	const dir = "services/datapath/internal"
	imported := regexp.MustCompile(`"github\.com/sluice-net/sluice/` + dir + `/([a-z0-9]+)`)
	table := rows(t, "docs/architecture.md", "### Subjects of the datapath")
	seen := make(map[string]bool)
	for _, name := range packages(t, dir) {
		subject, _, _ := strings.Cut(name, "/")
		seen["`"+subject+"`"] = true
		row := table["`"+subject+"`"]
		if len(row) == 0 {
			t.Errorf("docs/architecture.md has no row for %s/%s", dir, subject)
			continue
		}
		cells := strings.Split(row[0], " | ")
		may := cells[len(cells)-1]
		if name == "kernel" || may == "all" {
			continue
		}
		for _, m := range imported.FindAllStringSubmatch(direct(t, dir+"/"+name), -1) {
			if m[1] != subject && !strings.Contains(may, "`"+m[1]+"`") {
				t.Errorf("%s/%s imports %s, and the row of %s allows %q", dir, name, m[1], subject, may)
			}
		}
	}
	for subject := range table {
		if strings.HasPrefix(subject, "`") && !seen[subject] {
			t.Errorf("docs/architecture.md has a row for %s, and %s has no such folder", subject, dir)
		}
	}
}
