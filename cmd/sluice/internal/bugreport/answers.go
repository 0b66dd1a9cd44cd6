// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/cmd/sluice/internal/backend"
	"github.com/sluice-net/sluice/cmd/sluice/internal/bpfmap"
	"github.com/sluice-net/sluice/cmd/sluice/internal/check"
	"github.com/sluice-net/sluice/cmd/sluice/internal/config"
	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/fqdn"
	"github.com/sluice-net/sluice/cmd/sluice/internal/identity"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ipam"
	"github.com/sluice-net/sluice/cmd/sluice/internal/node"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policy"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/status"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// file is a file of the report: the JSON output of a command of this program with its arguments.
type file struct{ name, args string }

// subjects are the commands whose output is collected, in the order of the report. Each row has the component that
// answers; rows without a component describe the node as a whole. Each component has a settings file and a metrics file
// in addition.
var subjects = []struct {
	component string
	command   func(*invocation.Invocation) *cobra.Command
	files     []file
}{
	{"", status.Command, []file{{"status.json", "status"}}},
	{"", invocation.VersionCommand, []file{{"version.json", "version"}}},
	{"identity", identity.Command, []file{{"identities.json", "identity list"}}},
	{"identity", node.Command, []file{{"nodes.json", "node list"}}},
	{"ipam", ipam.Command, []file{{"pools.json", "ipam pools"}, {"allocations.json", "ipam list"}}},
	{"policy", policy.Command, []file{{"policies.json", "policy list"}}},
	{"policy", fqdn.Command, []file{{"learned-names.json", "fqdn list"}}},
	{"loadbalancer", service.Command, []file{{"services.json", "service list"}}},
	{"loadbalancer", backend.Command, []file{{"backends.json", "backend list"}}},
	{"datapath", endpoint.Command, []file{{"endpoints.json", "endpoint list"}}},
	{"datapath", bpfmap.Command, []file{{"maps.json", "map list"}}},
	{"datapath", observe.Command, []file{{"events.json", "observe --last 4096"}}},
	{"datapath", check.Command, []file{{"check.json", "check"}}},
}

// commands are the commands of all subjects.
var commands = func() []func(*invocation.Invocation) *cobra.Command {
	all := []func(*invocation.Invocation) *cobra.Command{config.Command}
	for _, s := range subjects {
		all = append(all, s.command)
	}
	return all
}()

// filesOf returns the files with the answers of a component.
func (r *report) filesOf(component string) (parts []part) {
	for _, s := range subjects {
		for _, f := range s.files {
			if s.component == component {
				parts = append(parts, r.sluice(f.name, f.args))
			}
		}
	}
	return parts
}

// groups returns the parts of the report.
func (r *report) groups(ctx context.Context) []group {
	all := []group{{parts: r.filesOf("")}}
	for _, name := range invocation.Services {
		all = append(all, r.ofService(name))
	}
	return append(all, r.ofMachine(ctx)...)
}

// ofService returns the parts that one process provides.
func (r *report) ofService(name string) group {
	g := group{telling: true, parts: append(r.filesOf(name), r.sluice("settings/"+name+".json", "config "+name), part{
		name: "metrics/" + name + ".txt", command: "curl --unix-socket .../metrics.sock http://localhost/metrics",
		take: func(ctx context.Context, w *content) error { return r.metrics(ctx, w, name) },
	})}
	switch {
	case name == "datapath":
		g.parts = append(g.parts, part{
			name: "connections.json", command: "sluice conntrack list --limit 1", take: r.connections,
		})
	case name == "policy" && !r.bare:
		g.parts = append(g.parts, part{
			name: "manifests.json", command: "sluice policy get, of all policies", take: r.manifests,
		})
	}
	return g
}

// sluice returns a part with the JSON output of a command of this program.
func (r *report) sluice(file, args string) part {
	return part{name: file, command: "sluice " + args, take: func(ctx context.Context, w *content) error {
		var errOut content
		errOut.limit = 64 << 10
		all := append([]string{
			"--instance=" + r.inv.Instance, "--run-dir=" + r.inv.RunDir, "--timeout=" + r.inv.Timeout.String(), "--output=json",
		}, strings.Fields(args)...)
		code := invocation.RunContext(ctx, all, w, &errOut, func(inv *invocation.Invocation) *cobra.Command {
			inv.AnswerLimit = r.answerLimit
			return inv.Root(commands...)
		})
		said, _ := errOut.close()
		return failure(code, said)
	}}
}

// exitCode is the error of a command that failed and whose output explains the failure.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// ExitCode returns the exit code of a command that was not killed.
func (e exitCode) ExitCode() int { return int(e) }

// failure returns the error of a failed command: the text on its standard error.
func failure(code int, said []byte) error {
	if code == 0 {
		return nil
	}
	var texts []string
	for line := range bytes.Lines(said) {
		var printed struct{ Error, Note string }
		switch {
		case json.Unmarshal(line, &printed) != nil:
			texts = append(texts, oneLine(string(line)))
		case printed.Error != "":
			texts = append(texts, oneLine(printed.Error))
		}
	}
	if len(texts) == 0 {
		return exitCode(code)
	}
	return errors.New(strings.Join(texts, "; "))
}

// connections writes the number of tracked connections.
func (r *report) connections(ctx context.Context, w *content) error {
	count := uint64(0)
	err := invocation.Stream(ctx, r.inv, invocation.Connections, datapathv1.ConnectionServiceClient.ListConnections,
		&datapathv1.ListConnectionsRequest{Limit: 1}, func(m *datapathv1.ListConnectionsResponse) error {
			count += 1 + m.GetOmittedConnectionCount()
			return nil
		})
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(map[string]uint64{"connections": count})
}

// manifests writes the manifest of each policy, one object per line. Manifests are parsed and re-encoded, so that
// secrets can be redacted by their names; manifests that cannot be parsed are left out.
func (r *report) manifests(ctx context.Context, w *content) error {
	return invocation.Stream(ctx, r.inv, invocation.Policy, policyv1.PolicyServiceClient.ListPolicies,
		&policyv1.ListPoliciesRequest{WithManifests: true}, func(m *policyv1.ListPoliciesResponse) error {
			p := m.GetPolicy()
			if p == nil {
				return nil
			}
			var parsed any
			var text bytes.Buffer
			manifest, omitted := message.Fact{Key: "manifest"}, message.Fact{Key: "omitted"}
			if err := yaml.Unmarshal(p.GetManifest(), &parsed); err != nil {
				omitted.Value = "the manifest cannot be read: " + err.Error()
			} else if err := json.NewEncoder(&text).Encode(parsed); err != nil {
				omitted.Value = "the manifest is not written as JSON: " + err.Error()
			} else {
				manifest.Value = parsed
			}
			return message.WriteLine(w, message.Of(p.GetKey(), manifest, omitted))
		})
}
