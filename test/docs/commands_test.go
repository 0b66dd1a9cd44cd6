// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const program = "sluice(?:-(?:datapath|identity|ipam|policy|loadbalancer|controller|hubble|store|dns))?"

// command is a command of sluice, from cmd/sluice/testdata/commands.txt, or a service.
type command struct {
	path  string
	flags []string // with their dashes
	subs  []string // with their aliases
	group bool     // it only has subcommands
}

// commandLine is a command in a text, with the arguments that the text gives.
type commandLine struct {
	line int
	text string
}

var (
	listedFlag = regexp.MustCompile(`^---- (--[a-z0-9-]+) (-[a-zA-Z0-9]?) `)
	// A setting's row in a reference page of a service.
	settingRow = regexp.MustCompile("(?m)^\\| `[\\w.]+` \\| `(--[a-z0-9-]+)`")
	// invoked matches the program of a command in a document, and advised in a message. invoked is stricter, because
	// sluice is also a user of etcd and the beginning of units of systemd.
	invoked = regexp.MustCompile(`(?:^|^[$#] |sudo |bin/|-- |[(|;&] ?)(kubectl sluice|` + program + `)[ \t]+`)
	advised = regexp.MustCompile(`(?:^|[\s/(])(kubectl sluice|` + program + `)[ \t]+`)
	span    = regexp.MustCompile("`([^`]+)`")
	// literal is a string of Go on one line.
	literal = regexp.MustCompile(`"((?:[^"\\]|\\.)*)"`)
	// ended matches the end of the arguments: another command, a redirection, a comment or prose follows.
	ended = regexp.MustCompile("(?:^|\\s)(?:[|;&#]|\\d?[<>]|\\\\n)|[;`)\"]|\\$\\(|: |, |\\.(?:\\s|$)")
)

// programs returns all commands by their path, such as "sluice policy apply", and the services.
func programs(t *testing.T) map[string]*command {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, "cmd/sluice/testdata/commands.txt"))
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]*command)
	for _, section := range strings.Split("\n"+string(content), "\n==== ")[1:] {
		path, help, _ := strings.Cut(section, "\n")
		c := &command{path: path, group: strings.Contains(help, "\nAvailable Commands:\n") &&
			strings.Contains(help, "\n  "+path+" [flags]\n")}
		c.flags = []string{"--help", "-h", "--version", "-v"}
		for line := range strings.Lines(help) {
			if m := listedFlag.FindStringSubmatch(line); m != nil {
				c.flags = append(c.flags, m[1:]...)
			}
		}
		all[path] = c
		parent, name := filepath.Split(strings.ReplaceAll(path, " ", "/"))
		if p := all[strings.ReplaceAll(strings.TrimSuffix(parent, "/"), "/", " ")]; p != nil {
			p.subs = append(p.subs, name)
			c.flags = append(c.flags, p.flags...)
		}
		if _, aliases, found := strings.Cut(help, "\nAliases:\n"); found {
			aliases, _, _ = strings.Cut(aliases, "\n")
			for _, alias := range strings.Split(strings.TrimSpace(aliases), ", ")[1:] {
				all["sluice"].subs = append(all["sluice"].subs, alias)
				all["sluice "+alias] = c
			}
		}
	}
	common, err := os.ReadFile(filepath.Join(root, "docs/reference/process.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{
		"datapath", "identity", "ipam", "policy", "loadbalancer", "controller", "hubble", "store", "dns",
	} {
		page, err := os.ReadFile(filepath.Join(root, "docs/reference", service+".md"))
		if err != nil {
			t.Fatal(err)
		}
		c := &command{path: "sluice-" + service, flags: []string{"--config", "--print-config", "--help", "--version"}}
		for _, m := range settingRow.FindAllStringSubmatch(string(common)+string(page), -1) {
			c.flags = append(c.flags, m[1])
		}
		all["sluice-"+service] = c
	}
	return all
}

// wrong returns the first word of a command that does not exist, or "". Words in capitals are placeholders.
func wrong(all map[string]*command, text string) string {
	at := ended.FindStringIndex(text)
	if at != nil {
		text = text[:at[0]]
	}
	words := strings.Fields(strings.Replace(text, "kubectl sluice", "sluice kubernetes", 1))
	c, inner := all[words[0]], true // inner: a word may be a subcommand
	for i := 1; i < len(words); i++ {
		word := strings.Trim(words[i], "[]()'")
		name, _, valued := strings.Cut(word, "=")
		switch {
		case word == "--", word == "---": // "---" ends a line about lost events
			return ""
		case strings.HasPrefix(name, "--"):
			if name != "--…" && !slices.Contains(c.flags, name) {
				return name
			}
			// The value of a flag of the root before a subcommand.
			if inner && !valued && len(c.subs) > 0 && i+1 < len(words) && !slices.Contains(c.subs, words[i+1]) {
				i++
			}
		case len(name) > 1 && name[0] == '-':
			if !slices.Contains(c.flags, name[:2]) && name != "-…" {
				return name
			}
			inner = inner && len(c.subs) == 0
		case inner && slices.Contains(c.subs, word):
			c = all[c.path+" "+word]
		case strings.HasPrefix(words[i], "["): // in a line of usage
		case inner && c.group && regexp.MustCompile(`^[a-z][a-z-]+$`).MatchString(word):
			return word
		default:
			inner = false
		}
	}
	return ""
}

// commandLines returns the commands in the code blocks and the code spans of a document.
func commandLines(content string) (found []commandLine) {
	add := func(line int, text string) {
		for _, at := range invoked.FindAllStringSubmatchIndex(text, -1) {
			found = append(found, commandLine{line, text[at[2]:]})
		}
	}
	code, paragraph, begin, continued := false, "", 0, ""
	flush := func() {
		for _, m := range span.FindAllStringSubmatch(paragraph, -1) {
			add(begin, m[1])
		}
		paragraph = ""
	}
	for i, line := range strings.Split(content, "\n") {
		trimmed := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(trimmed, "```"):
			flush()
			code = !code
		case code && strings.HasSuffix(trimmed, `\`):
			continued += strings.TrimSuffix(trimmed, `\`) + " "
		case code:
			add(i+1, continued+trimmed)
			continued = ""
		case trimmed == "":
			flush()
		default:
			if paragraph == "" {
				begin = i + 1
			}
			paragraph += " " + trimmed
		}
	}
	flush()
	return found
}

// TestDocumentsNameCommandsAndFlagsThatExist looks up every command and flag of sluice, and every flag of a service, in
// the code blocks and code spans of documents, and in the messages of all programs. It skips docs/record, which
// describes earlier versions.
func TestDocumentsNameCommandsAndFlagsThatExist(t *testing.T) {
	all := programs(t)
	if len(all) < 50 || len(all["sluice policy apply"].flags) < 10 || len(all["sluice-datapath"].flags) < 30 {
		t.Fatalf("%d commands, %v, %v", len(all), all["sluice policy apply"], all["sluice-datapath"])
	}
	checked := 0
	check := func(path string, lines []commandLine) {
		for _, l := range lines {
			checked++
			if word := wrong(all, l.text); word != "" {
				t.Errorf("%s:%d: %q has no %s", strings.TrimPrefix(path, root+"/"), l.line, cut(l.text), word)
			}
		}
	}
	for _, path := range documents(t) {
		content, err := os.ReadFile(path) //nolint:gosec // a document of the repository
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(path, "/docs/record/") {
			check(path, commandLines(string(content)))
		}
	}
	if checked < 300 {
		t.Errorf("the documents have %d commands", checked)
	}
	help, err := os.ReadFile(filepath.Join(root, "cmd/sluice/testdata/commands.txt"))
	if err != nil {
		t.Fatal(err)
	}
	check("cmd/sluice/testdata/commands.txt", append(commandLines(string(help)), commandLines("```\n"+string(help))...))
	for _, dir := range []string{"cmd", "devnode", "kit", "kube", "model", "services"} {
		for _, name := range packages(t, dir) {
			files, err := filepath.Glob(filepath.Join(root, dir, name, "*.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range files {
				if !strings.HasSuffix(path, "_test.go") {
					check(path, messages(t, path, all["sluice"].subs))
				}
			}
		}
	}
}

// TestDocumentsNameTargetsThatExist looks up the target of every `make` in documents.
func TestDocumentsNameTargetsThatExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`).FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}
	called := regexp.MustCompile("(?m)(?:`|^(?:[$] )?)make ([a-z][a-z0-9-]*)")
	found := 0
	for _, path := range documents(t) {
		content, err := os.ReadFile(path) //nolint:gosec // a document of the repository
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range called.FindAllStringSubmatch(string(content), -1) {
			found++
			if !targets[m[1]] && !strings.Contains(path, "/docs/record/") {
				t.Errorf("%s names `make %s`, and the Makefile has no such target", path, m[1])
			}
		}
	}
	if found < 50 {
		t.Errorf("the documents have %d calls of make", found)
	}
}

// messages returns the commands that the strings of a Go file advise. It ignores prose about sluice.
func messages(t *testing.T, path string, subs []string) (found []commandLine) {
	t.Helper()
	content, err := os.ReadFile(path) //nolint:gosec // a file of the repository
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(string(content), "\n") {
		for _, m := range literal.FindAllStringSubmatch(line, -1) {
			for _, at := range advised.FindAllStringSubmatchIndex(m[1], -1) {
				first, _, _ := strings.Cut(m[1][at[1]:], " ")
				if strings.HasPrefix(first, "-") || slices.Contains(subs, first) {
					found = append(found, commandLine{i + 1, m[1][at[2]:]})
				}
			}
		}
	}
	return found
}

func cut(text string) string { return text[:min(len(text), 80)] }

func TestWrongCommandsAreFound(t *testing.T) {
	all := programs(t)
	for text, want := range map[string]string{
		"sluice policy apply -f x.yaml --dry-run":     "",
		"sluice policy apply --validate-only":         "--validate-only",
		"sluice policy appl -f x.yaml":                "appl",
		"sluice --instance demo policy apply -x":      "-x",
		"sluice --instance=demo netpol apply --prune": "",
		"sluice-datapath --validate-only":             "",
		"sluice-datapath --no-such-setting=5":         "--no-such-setting",
		"sluice status; ls --no-such":                 "",
		"sluice status 2>&1 | grep --color x":         "",
		"sluice dev up --nodes 3 \\\\n":               "",
	} {
		if got := wrong(all, text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
	document := "Run `sluice status\n--wait` or:\n\n```console\n$ sudo bin/sluice dev up \\\n    --nodes=3\n```\n"
	want := []commandLine{{1, "sluice status --wait"}, {6, "sluice dev up      --nodes=3"}}
	if got := commandLines(document); !slices.EqualFunc(got, want, func(a, b commandLine) bool {
		return a.line == b.line && strings.Join(strings.Fields(a.text), " ") == strings.Join(strings.Fields(b.text), " ")
	}) {
		t.Errorf("got %s, want %s", fmt.Sprint(got), fmt.Sprint(want))
	}
}
