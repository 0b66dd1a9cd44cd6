// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package capture captures the packets of one pod of a cluster. The containers of the DaemonSet lack the privileges
// for that (docs/decisions/capture-by-root.md), so a temporary Job creates a privileged pod on the node. The user
// needs the right to create Jobs.
package capture

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	local "github.com/sluice-net/sluice/cmd/sluice/internal/capture"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

const (
	// removal is the timeout for the deletion of the Job.
	removal = 15 * time.Second
	// look is the interval of polling for the pod of the Job.
	look = 500 * time.Millisecond
)

// options are the flags of the command.
type options struct {
	local.Flags

	ifname string
	wait   time.Duration
}

// Command is `kubernetes capture`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "capture [NAMESPACE/]POD",
		Short: "Capture the packets of a pod, as pcapng",
		Long: `Capture the packets of a pod at its interface, in both directions, as pcapng, to a file or
to standard output of this machine, as ` + "`sluice capture`" + ` does on the node. Sluice's own
containers may not capture packets. Therefore the command creates a Job in Sluice's
namespace, whose pod runs on the node of the captured pod, with Sluice's image and the
capabilities NET_RAW and SYS_ADMIN. The command removes the Job at its end. If the command
is killed, the pod ends within half a minute, and the Job is removed half a minute later.

The capture ends on an interrupt, or at --count, --duration or --max-size. If the
connection to the node breaks, the file has the packets received so far, and the exit code
is 1.`,
		Example: `  kubectl sluice capture shop/web-0 -w web.pcapng --duration 30s
  kubectl sluice capture shop/web-0 --port 80 | tcpdump -nr -
  kubectl sluice capture shop/web-0 --drops | wireshark -ki -`,
		Args: invocation.Args(1, "a pod"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.Check(inv.Out, cmd.CommandPath()+" "+args[0]); err != nil {
				return err
			}
			namespace, name, found := strings.Cut(args[0], "/")
			if !found {
				namespace, name = "default", args[0]
			}
			if namespace == "" || name == "" || strings.Contains(name, "/") {
				return invocation.Usagef("%q is not [NAMESPACE/]POD", args[0])
			}
			c := capture{options: o, inv: inv, client: client}
			return c.run(cmd.Context(), namespace, name)
		},
	}
	o.Add(cmd.Flags())
	cmd.Flags().StringVar(&o.ifname, "interface", "", "interface of a pod with several interfaces, for example eth0")
	cmd.Flags().DurationVar(&o.wait, "wait", time.Minute, "timeout for the start of the capturing pod")
	return cmd
}

// capture is one run of the command.
type capture struct {
	options

	inv    *invocation.Invocation
	client *kubectl.Client
	set    kubectl.DaemonSet
}

func (c *capture) run(ctx context.Context, namespace, name string) error {
	node, container, err := c.find(ctx, namespace, name)
	if err != nil {
		return err
	}
	// Catch SIGPIPE: if the reader of the pipe exits, the write fails, and the command can still remove the Job.
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	defer signal.Stop(broken)
	job := fmt.Sprintf("%s-%08x", labelValue, rand.Uint32())
	if err := c.create(ctx, job, node); err != nil {
		_ = c.remove(ctx, job) // the Job may exist even if the answer was lost
		return err
	}
	return errors.Join(c.onNode(ctx, node, job, container), c.remove(ctx, job))
}

// endpoint contains the fields of `sluice endpoint list` that the command needs.
type endpoint struct {
	Owner struct {
		ContainerID   string `json:"containerId"`
		InterfaceName string `json:"interfaceName"`
	} `json:"owner"`
	Pod *struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"pod"`
}

// find returns the node of a pod, and CONTAINER/INTERFACE of its endpoint.
func (c *capture) find(ctx context.Context, namespace, name string) (node, container string, err error) {
	pod, err := c.client.Pod(ctx, namespace+"/"+name)
	switch {
	case err != nil:
		return "", "", err
	case pod.Node == "":
		return "", "", fmt.Errorf("the pod %s/%s is on no node yet", namespace, name)
	case pod.HostNetwork:
		return "", "", fmt.Errorf("the pod %s/%s uses the network of its node %s: capture there, for example with tcpdump",
			namespace, name, pod.Node)
	}
	cluster, err := c.client.Cluster(ctx)
	if err != nil {
		return "", "", err
	}
	c.set = cluster.DaemonSet
	i := slices.IndexFunc(cluster.Nodes, func(n kubectl.Node) bool { return n.Name == pod.Node })
	switch {
	case i < 0:
		return "", "", fmt.Errorf("the pod %s/%s is on %s, which is not among the nodes", namespace, name, pod.Node)
	case c.set.Image == "":
		return "", "", fmt.Errorf("DaemonSet %s has no container cni, whose image the capture needs", c.set.Name)
	}
	out, err := c.client.Sluice(ctx, cluster.Nodes[i], "endpoint", "list", "--output=json",
		"--timeout="+c.client.Timeout().String())
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", pod.Node, err)
	}
	all, err := endpointsOf(out)
	if err != nil {
		return "", "", fmt.Errorf("%s: sluice endpoint list: %w", pod.Node, err)
	}
	container, err = choose(all, namespace, name, c.ifname)
	if err != nil {
		err = fmt.Errorf("%s: %w", pod.Node, err)
	}
	return pod.Node, container, err
}

// endpointsOf parses the output of `sluice endpoint list`. An older version of the program in the pod prints a JSON
// array instead of an object with items.
func endpointsOf(out []byte) ([]endpoint, error) {
	var list struct{ Items []endpoint }
	if err := json.Unmarshal(out, &list); err == nil {
		return list.Items, nil
	}
	return list.Items, json.Unmarshal(out, &list.Items)
}

// choose returns the only endpoint of a pod, or the endpoint with the given interface.
func choose(all []endpoint, namespace, name, ifname string) (string, error) {
	var names, containers []string
	for _, e := range all {
		if e.Pod == nil || e.Pod.Namespace != namespace || e.Pod.Name != name {
			continue
		}
		names = append(names, e.Owner.InterfaceName)
		if ifname == "" || e.Owner.InterfaceName == ifname {
			containers = append(containers, e.Owner.ContainerID+"/"+e.Owner.InterfaceName)
		}
	}
	switch {
	case len(names) == 0:
		return "", fmt.Errorf("Sluice has no endpoint of the pod %s/%s", namespace, name) //nolint:staticcheck // a name
	case len(containers) == 0:
		return "", invocation.Usagef("--interface: the pod has no %s, but %s", ifname, strings.Join(names, ", "))
	case len(containers) > 1:
		return "", invocation.Usagef("the pod has several interfaces, --interface names one: %s", strings.Join(names, ", "))
	}
	return containers[0], nil
}

func (c *capture) create(ctx context.Context, job, node string) error {
	content, err := json.Marshal(jobOf(c.client.Namespace, job, node, c.set))
	if err != nil {
		return err
	}
	if _, err := c.client.RunFor(ctx, c.inv.Timeout+removal, content, "create", "--filename=-"); err != nil {
		return fmt.Errorf("create the Job %s: %w", job, err)
	}
	return nil
}

// onNode captures on a node. It opens the output file only after the capture has started, so that a failed start leaves
// an existing file unchanged.
func (c *capture) onNode(ctx context.Context, node, job, container string) error {
	pod, err := c.started(ctx, job)
	if err != nil {
		return err
	}
	stream, err := c.OpenStream(c.inv.Out)
	if err != nil {
		return err
	}
	c.inv.Note(fmt.Sprintf("captured on %s by the pod %s/%s", node, c.client.Namespace, pod))
	return errors.Join(c.copy(ctx, pod, container, stream), stream.Close())
}

// copy executes the capture in a pod and writes its output.
func (c *capture) copy(ctx context.Context, pod, container string, to *local.Stream) error {
	args := []string{
		"--namespace=" + c.client.Namespace, "exec", pod, "--container=" + containerName, "--stdin", "--",
		"sluice", "capture", container, "--" + invocation.UntilInputEnds,
	}
	err := c.client.Pipe(ctx, to, c.inv.ErrOut, append(args, c.Args()...)...)
	var failed *kubectl.Error
	switch {
	case errors.Is(to.Err(), syscall.EPIPE):
		return nil // the reader of the pipe has exited
	case to.Err() != nil:
		err = to.Err() // kubectl reports only a broken pipe
	case to.Complete():
		return nil
	case errors.As(err, &failed) && to.Packets() == 0:
		return invocation.ErrReported // already on standard error
	case err == nil:
		err = errors.New("the stream ended early")
	}
	return fmt.Errorf("the capture is incomplete after %d packets: %w", to.Packets(), err)
}

// started waits until the pod of the Job runs.
func (c *capture) started(ctx context.Context, job string) (pod string, err error) {
	timed, cancel := context.WithTimeout(ctx, c.wait)
	defer cancel()
	defer c.inv.Progress(func() string { return "waiting for the pod of the Job " + job })()
	why := "the Job has no pod"
	for {
		var list struct{ Items []jobPod }
		err := c.client.Get(timed, &list, "pods", "--namespace="+c.client.Namespace, "--selector=job-name="+job)
		if err != nil {
			why = err.Error()
		}
		for _, p := range list.Items {
			if p.Status.Phase == "Running" {
				return p.Metadata.Name, nil
			}
			why = p.why()
			if p.ended() {
				return "", fmt.Errorf("the Job %s/%s: %s; with an image of an earlier version, %s, there is no capture",
					c.client.Namespace, job, why, c.set.Image)
			}
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-timed.Done():
			return "", fmt.Errorf("the Job %s/%s did not start within %s: %s%s", c.client.Namespace, job, c.wait, why,
				c.events(ctx, job))
		case <-time.After(look):
		}
	}
}

// events returns the events of a Job without a pod.
func (c *capture) events(ctx context.Context, job string) string {
	var list struct{ Items []struct{ Message string } }
	err := c.client.Get(ctx, &list, "events", "--namespace="+c.client.Namespace,
		"--field-selector=involvedObject.name="+job)
	if err != nil {
		return ""
	}
	var text bytes.Buffer
	for _, e := range list.Items[max(0, len(list.Items)-2):] {
		fmt.Fprintf(&text, "; %s", strings.Join(strings.Fields(e.Message), " "))
	}
	return text.String()
}

// remove removes the Job with its pod, even if ctx has ended.
func (c *capture) remove(ctx context.Context, job string) error {
	args := []string{"--namespace=" + c.client.Namespace, "delete", "job", job}
	if _, err := c.client.RunFor(context.WithoutCancel(ctx), removal, nil,
		append(args, "--ignore-not-found", "--wait=false", "--cascade=background")...); err != nil {
		return fmt.Errorf("the Job %s/%s may be left for a minute: %w", c.client.Namespace, job, err)
	}
	return nil
}
