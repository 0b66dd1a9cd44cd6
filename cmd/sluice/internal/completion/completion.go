// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package completion completes arguments and values of flags in the shell. It asks the services of the node for names,
// with a timeout of half a second. If a service does not answer, its names are not offered.
package completion

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

const (
	// patience limits the wait for a service.
	patience = 500 * time.Millisecond
	// most limits the number of values: shells ask before they print more than about a hundred.
	most = 1000
)

// safe matches values without characters that are special to a shell.
var safe = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:/,=-]*$`)

// values returns possible values, each with an optional description after a tab. args are the preceding arguments.
type values func(ctx context.Context, inv *invocation.Invocation, args []string) []string

// flagValues returns the possible values of flags, by the name of the flag. The shell completes file names for
// fileFlags.
var (
	flagValues = map[string]values{
		"output": words(invocation.Formats...), "instance": instances,
		"direction": words("egress", "ingress"), "protocol": words(slices.Sorted(maps.Keys(ports.Protocols))...),
		"reason":    enum("REASON_", datapathv1.Reason_value),
		"verdict":   enum("VERDICT_", datapathv1.Verdict_value),
		"type":      enum("FLOW_TYPE_", datapathv1.FlowType_value),
		"container": containers, "pod": pods, "from": ends, "to": ends, "subject": ends, "identity": identities,
		"kind": words(policykind.Names()...), "service": services,
		"policy-mode": words("required", "init", "none"), "routing": words("overlay", "native", "none"),
		"etcd-members": words("1", "3"), "mount-bpffs": words("auto", "always", "never"), "icmp": words("echo"),
	}
	fileFlags = []string{
		"bin-dir", "cni-directory", "file", "filename", "kubeconfig", "kubectl", "output-file", "plugin-directory",
		"policy-dir", "run-dir", "service-dir", "write",
	}
)

// argumentValues returns the possible values of arguments, by command and position. The last function also applies to
// all further arguments.
var argumentValues = map[string][]values{
	"endpoint get": {containers}, "endpoint label": {containers, nothing}, "endpoint check": {containers},
	"endpoint delete": {containers}, "endpoint audit-mode": {containers, words("on", "off")}, "ipam release": {containers},
	"capture": {containers}, "identity get": {identities}, "map dump": {mapNames},
	"node get": {nodes}, "node forget": {nodes}, "service get": {services}, "service delete": {services},
	"policy get": {kinds, policies}, "policy delete": {kinds, policies}, "policy table": {ends},
}

// Add adds completion to the flags and arguments of all commands below root.
func Add(inv *invocation.Invocation, root *cobra.Command) {
	register := func(cmd *cobra.Command, flags *pflag.FlagSet) {
		flags.VisitAll(func(f *pflag.Flag) {
			if slices.Contains(fileFlags, f.Name) {
				return
			}
			of := flagValues[f.Name]
			if cmd.CommandPath() != root.Name() && strings.HasPrefix(cmd.CommandPath(), root.Name()+" kubernetes") &&
				asks(f.Name) {
				of = nil // the values are on other machines
			}
			// The only possible error is a flag that already has a completion.
			_ = cmd.RegisterFlagCompletionFunc(f.Name, completer(inv, of, true))
		})
	}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		register(cmd, cmd.PersistentFlags())
		register(cmd, cmd.LocalNonPersistentFlags())
		if cmd.ValidArgsFunction == nil && len(cmd.ValidArgs) == 0 && !cmd.HasSubCommands() {
			cmd.ValidArgsFunction = arguments(inv, argumentValues[strings.TrimPrefix(cmd.CommandPath(), root.Name()+" ")])
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
}

// asks reports whether the values of a flag are objects of this node, which its services are asked for.
func asks(flag string) bool {
	return slices.Contains([]string{"instance", "container", "pod", "from", "to", "subject", "identity", "service"}, flag)
}

type function = func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective)

func arguments(inv *invocation.Invocation, places []values) function {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		var of values
		switch {
		case len(args) < len(places):
			of = places[len(args)]
		case len(places) > 0 && strings.Contains(cmd.Use, "..."):
			of = places[len(places)-1]
		}
		return completer(inv, of, false)(cmd, args, begun)
	}
}

// completer returns the values that begin with the typed text. With lists, it completes the text after the last
// comma.
func completer(inv *invocation.Invocation, of values, lists bool) function {
	return func(cmd *cobra.Command, args []string, begun string) (found []string, _ cobra.ShellCompDirective) {
		if of == nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		before := ""
		if i := strings.LastIndexByte(begun, ','); lists && i >= 0 {
			before, begun = begun[:i+1], begun[i+1:]
		}
		ctx := cmd.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		quick := *inv
		quick.Timeout = patience
		for _, v := range of(ctx, &quick, args) {
			value, _, _ := strings.Cut(v, "\t")
			if safe.MatchString(value) && strings.HasPrefix(strings.ToLower(value), strings.ToLower(begun)) &&
				!slices.Contains(strings.Split(strings.TrimSuffix(before, ","), ","), value) && len(found) < most {
				found = append(found, before+v)
			}
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}

func words(all ...string) values {
	return func(context.Context, *invocation.Invocation, []string) []string { return all }
}

var nothing = words()

// enum returns the accepted names of an enum.
func enum(prefix string, numbers map[string]int32) values {
	var all []string
	for name, n := range numbers {
		if n != 0 {
			all = append(all, strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, prefix), "_", "-")))
		}
	}
	slices.Sort(all)
	return words(all...)
}

// instances returns the instances on this machine.
func instances(context.Context, *invocation.Invocation, []string) (all []string) {
	found, _ := filepath.Glob("/run/sluice-*")
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			all = append(all, strings.TrimPrefix(filepath.Base(path), "sluice-"))
		}
	}
	return all
}

// described returns a value with its description. It escapes the description, which may come from a container.
func described(value, text string) string {
	if text == "" {
		return value
	}
	return value + "\t" + output.Printable(text)
}

func containers(ctx context.Context, inv *invocation.Invocation, _ []string) (all []string) {
	found, err := endpoint.List(ctx, inv)
	if err != nil {
		return nil
	}
	interfaces := map[string]int{}
	for _, e := range found {
		interfaces[e.GetOwner().GetContainerId()]++
	}
	for _, e := range found {
		if p := e.GetPod(); p.GetNamespace() != "" {
			all = append(all, described(workload.PodText(p), e.GetOwner().GetContainerId()))
		}
		o := workload.OwnerOf(e.GetOwner())
		name := o.ContainerID
		if interfaces[name] > 1 {
			name += "/" + o.Interface
		}
		text := workload.Text(workload.LabelTexts(e.GetLabels()))
		if p := e.GetPod(); p.GetName() != "" {
			text = p.GetNamespace() + "/" + p.GetName()
		}
		all = append(all, described(name, text))
	}
	return all
}

func pods(ctx context.Context, inv *invocation.Invocation, _ []string) (all []string) {
	found, err := endpoint.List(ctx, inv)
	if err != nil {
		return nil
	}
	for _, e := range found {
		if p := e.GetPod(); p.GetName() != "" {
			all = append(all, p.GetNamespace()+"/"+p.GetName())
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// ends returns the possible names for one end of a connection: containers and reserved identities.
func ends(ctx context.Context, inv *invocation.Invocation, args []string) []string {
	all := containers(ctx, inv, args)
	for _, r := range identity.Reserved() {
		if labels := r.Labels.All(); len(labels) == 1 {
			all = append(all, labels[0].Source+":"+labels[0].Key)
		}
	}
	return all
}

func identities(ctx context.Context, inv *invocation.Invocation, _ []string) (all []string) {
	_ = invocation.Each(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.ListIdentities,
		&identityv1.ListIdentitiesRequest{}, func(m *identityv1.ListIdentitiesResponse) {
			if len(all) < most {
				all = append(all, described(strconv.FormatUint(uint64(m.GetIdentity().GetNumber()), 10),
					workload.Text(workload.LabelTexts(m.GetIdentity().GetLabels()))))
			}
		})
	return all
}

func mapNames(ctx context.Context, inv *invocation.Invocation, _ []string) (all []string) {
	r, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.GetStatus,
		&datapathv1.GetStatusRequest{})
	if err != nil {
		return nil
	}
	for _, m := range r.GetMaps() {
		all = append(all, m.GetName())
	}
	return all
}

func nodes(ctx context.Context, inv *invocation.Invocation, _ []string) (all []string) {
	_ = invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListNodes,
		&identityv1.ListNodesRequest{}, func(m *identityv1.ListNodesResponse) { all = append(all, m.GetNode().GetName()) })
	return all
}

func services(ctx context.Context, inv *invocation.Invocation, _ []string) (all []string) {
	_ = invocation.Each(ctx, inv, invocation.LoadBalancer, lbv1.LoadBalancerServiceClient.ListServices,
		&lbv1.ListServicesRequest{}, func(m *lbv1.ListServicesResponse) {
			if s := m.GetService(); s.GetName() != "" && len(all) < most {
				all = append(all, s.GetNamespace()+"/"+s.GetName())
			}
		})
	return all
}

func kinds(context.Context, *invocation.Invocation, []string) []string { return policykind.Names() }

// policies returns the policies of the kind in args[0].
func policies(ctx context.Context, inv *invocation.Invocation, args []string) (all []string) {
	kind, err := policykind.Named(args[0])
	if err != nil {
		return nil
	}
	_ = invocation.Each(ctx, inv, invocation.Policy, policyv1.PolicyServiceClient.ListPolicies,
		&policyv1.ListPoliciesRequest{Kind: kind.Name}, func(m *policyv1.ListPoliciesResponse) {
			k := m.GetPolicy().GetKey()
			switch {
			case k.GetName() == "" || len(all) >= most:
			case k.GetNamespace() == "":
				all = append(all, k.GetName())
			default:
				all = append(all, k.GetNamespace()+"/"+k.GetName())
			}
		})
	return all
}
