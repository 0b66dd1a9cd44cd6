// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// hubbleMessage is a part of the answers of Hubble's API.
type hubbleMessage struct {
	Flow *struct {
		UUID           string
		Verdict        string
		NodeName       string
		DropReasonDesc string
		Source         hubbleEndpoint
		Destination    hubbleEndpoint
		L4             struct {
			TCP *struct{ DestinationPort int }
		}
		IngressDenied []struct{ Kind, Namespace, Name string } `json:"ingressDeniedBy"`
	}
	LostEvents *struct{ NumEventsLost string }
	NumFlows   string
}

type hubbleEndpoint struct {
	Namespace, PodName string
	Labels             []string
}

// hubbleJSON calls a method of sluice-hubble and returns its answers as text.
func (n *testNode) hubbleJSON(t *testing.T, method, request string) ([]byte, error) {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(binDir(), "tools/grpcurl"), "-plaintext", "-unix", "-authority",
		"localhost", "-d", request, n.Socket(devnode.Hubble), "observer.Observer/"+method)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", method, err, errOut.String())
	}
	return out, nil
}

// hubble calls a method of sluice-hubble and returns its answers.
func (n *testNode) hubble(t *testing.T, method, request string) (all []hubbleMessage, err error) {
	t.Helper()
	out, err := n.hubbleJSON(t, method, request)
	if err != nil {
		return nil, err
	}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var m hubbleMessage
		if err := d.Decode(&m); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("%w in %s", err, out)
		}
		all = append(all, m)
	}
}

// TestKernelHubbleShowsFlowsOfTheDatapath: connections and drops of real packets are in the answers, with pods and
// policies, once each, while both processes are killed.
func TestKernelHubbleShowsFlowsOfTheDatapath(t *testing.T) {
	n := newNode(t, func(o *devnode.Options) { o.Hubble = true })
	if log, err := os.ReadFile(n.Log(devnode.Hubble)); err != nil || bytes.Contains(log, []byte("retrying")) {
		t.Errorf("it did not start after the services that it follows: %v\n%s", err, log)
	}
	pods := n.addPods(t, "server", "client")
	server, client := pods[0], pods[1]
	serve(t, server, 8080, 9090)
	wantAllowed(t, client, server, 8080)
	enforce(t, n.policies(t), `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: test}
spec:
  podSelector: {}
  ingress: [{ports: [{port: 8080}]}]
`)
	flows := n.observe(t, &datapathv1.ObserveRequest{Follow: true})
	denied := len(n.wantDenied(t, flows, client, server, 9090))
	for _, kill := range []string{"", devnode.Hubble, devnode.Datapath} {
		if kill != "" {
			ctx, cancel := deadline(t)
			defer cancel()
			if err := n.Kill(ctx, kill); err != nil {
				t.Fatal(err)
			}
			if kill == devnode.Hubble { // flows happen while nobody reads them
				wantAllowed(t, client, server, 8080)
			}
			if err := n.Start(ctx, kill); err != nil {
				t.Fatal(err)
			}
		}
		wantAllowed(t, client, server, 8080)
		servicetest.EventuallyNil(t, "the flows of both ports are there after "+kill, func() error {
			all, err := n.hubble(t, "GetFlows", "{}")
			if err != nil {
				return err
			}
			seen, allowed, dropped := map[string]bool{}, 0, 0
			for _, m := range all {
				f := m.Flow
				if f == nil {
					continue
				}
				if seen[f.UUID] {
					return fmt.Errorf("flow %s comes twice", f.UUID)
				}
				seen[f.UUID] = true
				if f.L4.TCP == nil || f.NodeName != n.Name() || f.Destination.PodName != server.Name ||
					f.Source.PodName != client.Name || f.Source.Namespace != "test" {
					continue
				}
				switch {
				case f.Verdict == "FORWARDED" && f.L4.TCP.DestinationPort == 8080:
					allowed++
				case f.Verdict == "DROPPED" && f.L4.TCP.DestinationPort == 9090 && f.DropReasonDesc == "POLICY_DENIED" &&
					fmt.Sprint(f.IngressDenied) == "[{NetworkPolicy test web}]":
					dropped++
				}
			}
			if allowed < 2 || dropped < denied {
				return fmt.Errorf("%d allowed, %d dropped, of %d messages", allowed, dropped, len(all))
			}
			return nil
		})
	}
	got, err := n.hubble(t, "GetFlows",
		`{"number": 100, "whitelist": [{"verdict": ["DROPPED"], "source_pod": ["test/client"]}]}`)
	if err != nil || len(got) < denied {
		t.Errorf("filtered: %d flows, %v; the datapath reported %d drops", len(got), err, denied)
	}
}

// TestKernelFullDiskStopsOnlyTheHistoryOfHubble: new flows are answered from memory, and pods still connect.
func TestKernelFullDiskStopsOnlyTheHistoryOfHubble(t *testing.T) {
	n := newNode(t, func(o *devnode.Options) { o.Hubble = true })
	fill := n.smallDisk(t, devnode.Hubble)
	pods := n.addPods(t, "server", "client")
	serve(t, pods[0], 8080)
	fill()
	wantAllowed(t, pods[1], pods[0], 8080)
	servicetest.EventuallyNil(t, "the flows are answered", func() error {
		all, err := n.hubble(t, "GetFlows", `{"whitelist": [{"destination_port": ["8080"]}]}`)
		if err == nil && len(all) == 0 {
			err = errors.New("no flows")
		}
		return err
	})
	servicetest.EventuallyNil(t, "the log names the disk", func() error {
		log, err := os.ReadFile(n.Log(devnode.Hubble))
		if err == nil && !strings.Contains(string(log), "no space left on device") {
			err = errors.New("it does not")
		}
		return err
	})
	// A restart on the full disk reads what is stored.
	ctx, cancel := deadline(t)
	defer cancel()
	if err := n.Kill(ctx, devnode.Hubble); err != nil {
		t.Fatal(err)
	}
	if err := n.Start(ctx, devnode.Hubble); err != nil {
		t.Fatal(err)
	}
	if _, err := n.hubble(t, "ServerStatus", "{}"); err != nil {
		t.Error(err)
	}
	wantAllowed(t, pods[1], pods[0], 8080)
}
