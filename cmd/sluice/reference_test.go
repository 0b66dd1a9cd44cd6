// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// reference is docs/reference.md without its rows.
const reference = `# Reference

What programs and people may rely on, and where it is written. Tests compare each list with the code: what is lost or
renamed fails one of them.

| what | where |
|---|---|
| commands, flags, help texts | [cmd/sluice/testdata/commands.txt](../cmd/sluice/testdata/commands.txt) |
| what commands print, exit codes | [cmd/sluice/testdata/outputs.txt](../cmd/sluice/testdata/outputs.txt) |
| settings and metrics of every service | [process.md](process.md) |
| settings and metrics of sluice-identity | [identity.md](identity.md) |
| settings and metrics of sluice-ipam | [ipam.md](ipam.md) |
| settings and metrics of sluice-policy | [policy.md](policy.md) |
| settings and metrics of sluice-loadbalancer | [loadbalancer.md](loadbalancer.md) |
| settings and metrics of sluice-datapath | [endpoints.md](endpoints.md) |
| keys in etcd | [identity.md](identity.md) |
| calls of the services | below; the comments of ` + "`proto/`" + ` say what each does |

## Calls

| call | takes | answers with |
|---|---|---|
`

// TestReferenceListsEveryCall compares docs/reference.md with the services that
// the API defines. -update writes it anew.
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
