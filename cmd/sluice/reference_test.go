// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// reference is docs/reference.md without its rows.
var reference = `# Reference

Interfaces that programs and people may rely on, and the pages that list them. Tests compare each list with the code: a
lost or renamed name fails a test.

| what | where |
|---|---|
| commands, flags, help texts | [reference/commands.md](reference/commands.md) |
| output and exit codes of commands | [cmd/sluice/testdata/outputs.txt](../cmd/sluice/testdata/outputs.txt) |
| settings and metrics of every service | [reference/process.md](reference/process.md) |
| settings and metrics of sluice-identity | [reference/identity.md](reference/identity.md) |
| settings and metrics of sluice-ipam | [reference/ipam.md](reference/ipam.md) |
| settings and metrics of sluice-policy | [reference/policy.md](reference/policy.md) |
| settings and metrics of sluice-loadbalancer | [reference/loadbalancer.md](reference/loadbalancer.md) |
| settings and metrics of sluice-controller | [reference/controller.md](reference/controller.md) |
| settings and metrics of sluice-store | [reference/store.md](reference/store.md) |
| settings and metrics of sluice-datapath | [reference/datapath.md](reference/datapath.md) |
| settings and metrics of sluice-hubble | [reference/hubble.md](reference/hubble.md) |
| settings and metrics of sluice-dns | [reference/dns.md](reference/dns.md) |
| keys in etcd | [reference/identity.md](reference/identity.md#keys-in-etcd) |
| calls of the services | below; the comments in ` + "`proto/`" + ` describe each call |

## JSON

` + "`-o json` of `sluice` and `kubectl sluice`" + ` is for programs. Its rules:

` + jsonRules + `- An error is one line ` + "`{\"error\":\"…\"}`" +
	` on standard error; the exit codes are the same as with ` + "`-o table`" + `.

Keys may be added at any time. A key keeps its name and meaning until 1.0; [changes.md](changes.md) lists exceptions.
[reference/json.md](reference/json.md) lists the keys of each command.
[cmd/sluice/testdata/outputs.txt](../cmd/sluice/testdata/outputs.txt) has an example of the output
of each command, which a test compares.

## Calls

| call | takes | answers with |
|---|---|---|
`

// jsonRules are the rules of the package message and of the commands, with ' for the sign that Go's text cannot have.
var jsonRules = strings.ReplaceAll(`- The answer of a service is printed as one object. Its keys are the fields of the
  message, in camel case and in their order; 'endpoint_index' is 'endpointId'. Keys that the command adds follow. A
  command that asks several services prints one key for each answer.
- A listing command prints one object with the list as 'items', which is never absent or null.
- Output that does not end or may be large is one object a line: 'observe', 'endpoint events', 'conntrack list',
  'map dump'.
- Zero values are present. Unset messages, times, optional fields and enums without a value are absent.
- Enums are in lower case without their prefix, with '-' between words. A value that the program does not know is
  printed as its number. Flags, such as TCP flags, are a list of names.
- Numbers are JSON numbers. Numbers that may reach 2^53 are text: 'addressCount', 'reservedCount' and 'freeCount' of a
  pool.
- Times are RFC 3339 in UTC. Durations are text such as '1m30s'. Bytes are hexadecimal; manifests are text.
- Labels are 'SOURCE:KEY=VALUE', sorted.
`, "'", "`")

// TestReferenceListsEveryCall compares docs/reference.md with the services of the API. -update rewrites the page.
func TestReferenceListsEveryCall(t *testing.T) {
	var rows []string
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			if !strings.HasPrefix(string(s.FullName()), "sluice.") {
				continue
			}
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				rows = append(rows, fmt.Sprintf("| `%s/%s` | %s | %s |\n", s.FullName(), m.Name(),
					message(m.Input(), m.IsStreamingClient()), message(m.Output(), m.IsStreamingServer())))
			}
		}
		return true
	})
	if len(rows) == 0 {
		t.Fatal("no service is registered")
	}
	slices.Sort(rows)
	compareWithFile(t, "../../../docs/reference.md", reference+strings.Join(rows, ""))
}

func message(m protoreflect.MessageDescriptor, stream bool) string {
	if stream {
		return fmt.Sprintf("stream of `%s`", m.Name())
	}
	return fmt.Sprintf("`%s`", m.Name())
}

// resume is the common text of all watches about resume tokens. The watched objects have different names.
var resume = regexp.MustCompile(
	"A disconnected caller continues with the resume token of the last message, and receives everything that was " +
		"deleted in the meantime as a deletion\\. OUT_OF_RANGE: the token is too old or belongs to another run of the " +
		"service; watch again without a token, and drop all [a-z ]+ that are not sent before the bookmark with " +
		"snapshot_complete\\. RESOURCE_EXHAUSTED: the caller reads too slowly and was disconnected; watch again with " +
		"the last token, which is valid unless the call returns OUT_OF_RANGE\\. UNAVAILABLE: the service is stopping; " +
		"watch again with the last token\\.")

// TestEveryWatchIsContinuedInOneWay: a client that can resume one watch can resume all.
func TestEveryWatchIsContinuedInOneWay(t *testing.T) {
	watches := 0
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			if !strings.HasPrefix(string(s.FullName()), "sluice.") {
				continue
			}
			comments := servicetest.Comments(t, filepath.Join("../../proto", filepath.Dir(f.Path())))
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				if m.Input().Fields().ByName("resume_token") == nil {
					continue
				}
				watches++
				name := fmt.Sprintf("%s/%s", s.Name(), m.Name())
				if !resume.MatchString(comments[name]) {
					t.Errorf("%s says %q, want in it %s", name, comments[name], resume)
				}
				if m.Output().Fields().ByName("bookmark") == nil || m.Output().Fields().ByName("resume_token") == nil {
					t.Errorf("%s answers without bookmarks or tokens", name)
				}
			}
		}
		return true
	})
	if watches < 6 {
		t.Errorf("%d watches were looked at", watches)
	}
}
