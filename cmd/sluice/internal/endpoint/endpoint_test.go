// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestEndpointsShowTheirPolicy(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "get", "0123")
	nodetest.WantLines(t, out, "Policy revision 6, newer refused", "Egress table 1 (allows everything)",
		"Ingress table 17", "Epoch 9", "Refused no capacity")
	for _, c := range []struct {
		policy *datapathv1.EndpointPolicy
		want   string
	}{
		{nil, ""},
		{
			&datapathv1.EndpointPolicy{EgressTable: verdict.TableAllow, IngressTable: verdict.TableAllow},
			"none, all is allowed",
		},
		{
			&datapathv1.EndpointPolicy{EgressTable: verdict.TableWaiting, IngressTable: verdict.TableWaiting},
			"waiting for a policy",
		},
		{&datapathv1.EndpointPolicy{Revision: 4, EgressTable: verdict.TableAllow, IngressTable: 16}, "revision 4"},
		{&datapathv1.EndpointPolicy{Revision: 4, IngressTable: 16, Audit: true}, "revision 4, audit only"},
	} {
		if got := policyText(c.policy); got != c.want {
			t.Errorf("%v reads %q, want %q", c.policy, got, c.want)
		}
	}
}

func TestEndpointListIsATableOrJSON(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "list")
	nodetest.WantLines(t, out,
		"CONTAINER POD STATE ADDRESSES POLICY IDENTITY",
		"0123456789abc/eth0 - ready 10.244.0.2,fd00:244::2 revision 6, newer refused", `app=web\x1b]0;x\a (300)`,
	)
	wide, _ := n.Want(t, 0, "endpoint", "list", "-o", "wide")
	nodetest.WantLines(t, wide,
		"CONTAINER POD STATE ADDRESSES POLICY IDENTITY ID DEVICE LABELS",
		`0123456789abc/eth0 - ready 10.244.0.2,fd00:244::2 revision 6, newer refused app=web\x1b]0;x\a (300) 1 sl0 `+
			`k8s:app=web\x1b]0;x\a`,
	)
	if strings.ContainsAny(out, "\x1b\a") {
		t.Errorf("what a container says reaches the terminal: %q", out)
	}
	out, _ = n.Want(t, 0, "endpoint", "list", "-o", "json")
	var list message.Items[*datapathv1.Endpoint]
	if err := nodetest.UnmarshalItems(out, &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if len(list) != 2 || list[0].GetOwner().GetContainerId() != nodetest.LongID ||
		list[0].GetAddresses()[0] != "10.244.0.2" || list[0].GetContainerInterface().GetMac() != "02:00:00:00:00:02" {
		t.Errorf("list %s", out)
	}
}

func TestEndpointGetTakesTheStartOfAnID(t *testing.T) {
	n := nodetest.New(t, Command)
	for _, name := range []string{nodetest.LongID, "0123", "0123/eth0"} {
		out, _ := n.Want(t, 0, "endpoint", "get", name)
		nodetest.WantLines(t, out, "Container "+nodetest.LongID, "Named ports http=80/tcp", "MTU 1500",
			"Host ports 8080=80/tcp [2001:db8::1]:53=5353/udp",
			"Sockets not translated; packets to services are translated instead")
	}
	n.Want(t, invocation.ExitFailed, "endpoint", "get", "9")
	n.Want(t, invocation.ExitFailed, "endpoint", "get", "0123/eth1")
	n.Want(t, invocation.ExitUsage, "endpoint", "get", "/eth0")
	n.Want(t, invocation.ExitUsage, "endpoint", "get")
}

func TestEndpointLabelChangesWhatWasGiven(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "label", "0123", "app=db", "k8s:tier=front")
	nodetest.WantLines(t, out, "0123456789abc/eth0 changed from identity 300 to cni:app=db,tier=front (301)")
	out, _ = n.Want(t, 0, "endpoint", "label", "0123", "--named-port", "http=8080/tcp", "-o", "json")
	changed := &datapathv1.Endpoint{}
	if err := message.Unmarshal([]byte(out), changed); err != nil || portsText(changed) != "http=8080/tcp" {
		t.Errorf("named ports: %s", out)
	}
	out, _ = n.Want(t, 0, "endpoint", "label", "0123", "app=db", "--dry-run")
	nodetest.WantLines(t, out, "Nothing was changed: --dry-run. 0123456789abc/eth0 would change from identity 300 "+
		"to cni:app=db (301)")
	for _, wrong := range [][]string{
		{"0123"},
		{"0123", "app"},
		{"0123", ":app=db"},
		{"0123", "=db"},
		{"0123", "other-"},
		{"0123", "--named-port", "http"},
		{"0123", "--named-port", "http=0/tcp"},
		{"0123", "--named-port", "http=80/igmpp"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"endpoint", "label"}, wrong...)...)
	}
}

// TestLabelsHaveTheSourceOfTheirContainer: podman sets a pod name but no namespace in CNI_ARGS, so the plugin gives the
// container labels with the source cni.
func TestLabelsHaveTheSourceOfTheirContainer(t *testing.T) {
	for want, pods := range map[string][]*workloadv1.PodReference{
		"cni": {nil, {Name: "client"}}, "k8s": {{Namespace: "shop"}, {Namespace: "shop", Name: "client", Uid: "1"}},
	} {
		for _, pod := range pods {
			if got := sourceOf(&datapathv1.Endpoint{Pod: pod}); got != want {
				t.Errorf("of %v: %s, want %s", pod, got, want)
			}
		}
	}
}

func TestChangesOfLabelsReplaceAndRemove(t *testing.T) {
	have := []*workloadv1.Label{
		{Source: "cni", Key: "app", Value: "web"}, {Source: "cni", Key: "old"}, {Source: "k8s", Key: "app", Value: "x"},
	}
	got, err := changed(have, []string{"app=db", "old-", "new="}, "cni")
	if want := "cni:app=db cni:new k8s:app=x"; err != nil || strings.Join(workload.LabelTexts(got), " ") != want {
		t.Errorf("%v, %v, want %s", workload.LabelTexts(got), err, want)
	}
}
