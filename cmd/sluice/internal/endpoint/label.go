// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func labelCommand(inv *invocation.Invocation) *cobra.Command {
	var ports []string
	var validate bool
	cmd := &cobra.Command{
		Use:   "label CONTAINER|POD [SOURCE:]KEY=VALUE | [SOURCE:]KEY- ...",
		Short: "Change the labels or named ports of a running container",
		Long: `Set the labels KEY=VALUE and remove the labels KEY-. The container gets the identity of its
new labels, and the policies of that identity; connections that these policies deny are
terminated. The default SOURCE is "cni", or "k8s" for a Kubernetes pod. If Sluice reads the
labels of a pod from Kubernetes, change them there.

` + NameHelp,
		Example: "  sluice endpoint label shop/web tier=front old-\n  sluice endpoint label 5f0c --named-port http=8080/tcp",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, a []string) error {
			withPorts := cmd.Flags().Changed("named-port")
			if len(a) == 1 && !withPorts {
				return invocation.Usagef("no change given: want labels or --named-port")
			}
			return changeLabels(cmd.Context(), inv, a[0], change{a[1:], ports, withPorts, validate})
		},
	}
	cmd.Flags().StringArrayVar(&ports, "named-port", nil,
		"replace the named ports of the container by NAME=PORT/PROTOCOL; empty removes all; may be repeated")
	invocation.ValidateFlag(cmd, &validate, "show the identity that the container would get; change nothing")
	return cmd
}

// change is a requested change of a container.
type change struct {
	labels    []string // KEY=VALUE or KEY-, with or without a source
	ports     []string // NAME=PORT/PROTOCOL
	withPorts bool     // ports replace the named ports of the container
	validate  bool
}

// sourceOf returns the default source of a label: the source that the CNI plugin uses for the container. A pod of
// podman has a name but no namespace.
func sourceOf(e *datapathv1.Endpoint) string {
	if e.GetPod().GetNamespace() != "" {
		return "k8s"
	}
	return "cni"
}

func changeLabels(ctx context.Context, inv *invocation.Invocation, name string, c change) error {
	e, err := Find(ctx, inv, name)
	if err != nil {
		return err
	}
	req := &datapathv1.UpdateEndpointRequest{Owner: e.GetOwner(), Manager: e.GetManager(), ValidateOnly: c.validate}
	if len(c.labels) > 0 {
		labels, err := changed(e.GetGivenLabels(), c.labels, sourceOf(e))
		if err != nil {
			return err
		}
		req.Labels = &datapathv1.GivenLabels{Labels: labels}
	}
	if c.withPorts {
		req.NamedPorts = &datapathv1.GivenPorts{}
		for _, text := range c.ports {
			if text == "" {
				continue
			}
			p, err := parsePort(text)
			if err != nil {
				return err
			}
			req.NamedPorts.NamedPorts = append(req.NamedPorts.NamedPorts, p)
		}
	}
	resp, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.UpdateEndpoint, req)
	if err != nil {
		return err
	}
	after := resp.GetEndpoint()
	return inv.Show(message.Of(after), func(w io.Writer) {
		const unchanged = "Nothing was changed: --dry-run."
		before, owner, text := e.GetIdentity(), workload.OwnerOf(after.GetOwner()), identityText(after)
		switch {
		case c.validate && after.GetIdentity() == 0:
			fmt.Fprintf(w, "%s %s would get a new identity: %s\n", unchanged, owner, text)
		case c.validate:
			fmt.Fprintf(w, "%s %s would change from identity %d to %s\n", unchanged, owner, before, text)
		case after.GetIdentity() == before:
			fmt.Fprintf(w, "%s stays identity %s\n", owner, text)
		default:
			fmt.Fprintf(w, "%s changed from identity %d to %s\n", owner, before, text)
		}
	})
}

// changed returns the labels after the changes [SOURCE:]KEY=VALUE and [SOURCE:]KEY-.
func changed(labels []*workloadv1.Label, changes []string, source string) ([]*workloadv1.Label, error) {
	labels = slices.Clone(labels)
	for _, text := range changes {
		name, value, set := strings.Cut(text, "=")
		if !set {
			var removes bool
			if name, removes = strings.CutSuffix(text, "-"); !removes {
				return nil, invocation.Usagef("%q is not a label change: want [SOURCE:]KEY=VALUE or [SOURCE:]KEY-", text)
			}
		}
		l := &workloadv1.Label{Source: source, Key: name, Value: value}
		if s, key, found := strings.Cut(name, ":"); found {
			l.Source, l.Key = s, key
		}
		if l.GetSource() == "" || l.GetKey() == "" {
			return nil, invocation.Usagef("%q has no label key: want [SOURCE:]KEY=VALUE or [SOURCE:]KEY-", text)
		}
		if !IsLabelValue(value) {
			return nil, invocation.Usagef("%q: %q is not a label value, so no policy could select it", text, value)
		}
		n := len(labels)
		labels = slices.DeleteFunc(labels, func(have *workloadv1.Label) bool {
			return have.GetSource() == l.GetSource() && have.GetKey() == l.GetKey()
		})
		if set {
			labels = append(labels, l)
		} else if len(labels) == n {
			return nil, invocation.Usagef("the container has no label %s:%s of its own; its own labels are %s",
				l.GetSource(), output.Printable(l.GetKey()), strings.Join(workload.LabelTexts(labels), " "))
		}
	}
	return labels, nil
}

// IsLabelValue reports whether Kubernetes accepts the value of a label. Selectors of policies can contain no other
// values.
func IsLabelValue(value string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	return len(value) <= 63 && strings.Trim(value, letters+"-_.") == "" && strings.Trim(value, "-_.") == value
}

// parsePort reads NAME=PORT/PROTOCOL.
func parsePort(text string) (*workloadv1.NamedPort, error) {
	name, rest, _ := strings.Cut(text, "=")
	number, protocol, _ := strings.Cut(rest, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	p := netv1.Protocol_value["PROTOCOL_"+strings.ToUpper(protocol)]
	if name == "" || err != nil || n == 0 || p == 0 {
		return nil, invocation.Usagef("%q is not a named port: want NAME=PORT/PROTOCOL, for example http=80/tcp", text)
	}
	return &workloadv1.NamedPort{Name: name, Port: uint32(n), Protocol: netv1.Protocol(p)}, nil
}
