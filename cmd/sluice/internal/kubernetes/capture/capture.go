// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package capture captures the packets of one pod of a cluster. No container of the DaemonSet may do that
// (docs/decisions/capture-by-root.md), so a Job with the rights makes a pod on the node for as long as it takes; the
// person needs the right to make one.
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
	// removal is how long the API may take to delete the Job.
	removal = 15 * time.Second
	// look is how often the pod of the Job is looked for.
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
		Short: "Capture the packets of one pod, as pcapng",
		Long: `Capture the packets of one pod at its interface, in both directions, as pcapng, to
a file or to standard output of this machine, as ` + "`sluice capture`" + ` does on the node.
No container of Sluice has the right to: a Job in Sluice's namespace makes a pod on
the node, with its image and the capabilities NET_RAW and SYS_ADMIN, for as long as
the command runs. It is removed at the end; if this command is killed, the pod ends
within half a minute, and the Job is removed half a minute later.

It ends with an interrupt, or with one of --count, --duration and --max-size. If the
connection to the node breaks, what came until then is in the file, and the exit
code is 1.`,
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
	cmd.Flags().StringVar(&o.ifname, "interface", "", "the interface of a pod that has several, for example eth0")
	cmd.Flags().DurationVar(&o.wait, "wait", time.Minute, "how long the pod that captures may take to start")
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
	// The end of whoever reads a pipe is an error of a write, after which the Job is removed.
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	defer signal.Stop(broken)
	job := fmt.Sprintf("%s-%08x", labelValue, rand.Uint32())
	if err := c.create(ctx, job, node); err != nil {
		_ = c.remove(ctx, job) // it may be there all the same, if the answer was lost
		return err
	}
	return errors.Join(c.onNode(ctx, node, job, container), c.remove(ctx, job))
}

// endpoint is what is read of `sluice endpoint list`.
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

// find finds the node of a pod, and the container with its interface as Sluice's datapath knows it.
func (c *capture) find(ctx context.Context, namespace, name string) (node, container string, err error) {
	pod, err := c.client.Pod(ctx, namespace+"/"+name)
	switch {
	case err != nil:
		return "", "", err
	case pod.Node == "":
		return "", "", fmt.Errorf("the pod %s/%s is on no node yet", namespace, name)
	case pod.HostNetwork:
		return "", "", fmt.Errorf("the pod %s/%s has the network of its node %s: capture there, for example with tcpdump",
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

// endpointsOf reads what `sluice endpoint list` has printed. The program in a pod may be older than this one, and print
// the list without the object around it.
func endpointsOf(out []byte) ([]endpoint, error) {
	var list struct{ Items []endpoint }
	if err := json.Unmarshal(out, &list); err == nil {
		return list.Items, nil
	}
	return list.Items, json.Unmarshal(out, &list.Items)
}

// choose finds the one interface of a pod, or the one that is named.
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

// create creates the Job.
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

// onNode captures on a node. What is in the file stays until there is a capture.
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

// copy executes the capture in a pod, and writes what it prints.
func (c *capture) copy(ctx context.Context, pod, container string, to *local.Stream) error {
	args := []string{
		"--namespace=" + c.client.Namespace, "exec", pod, "--container=" + containerName, "--stdin", "--",
		"sluice", "capture", container, "--" + invocation.UntilInputEnds,
	}
	err := c.client.Pipe(ctx, to, c.inv.ErrOut, append(args, c.Args()...)...)
	var failed *kubectl.Error
	switch {
	case errors.Is(to.Err(), syscall.EPIPE):
		return nil // whoever read has seen enough
	case to.Err() != nil:
		err = to.Err() // kubectl only says that nothing reads
	case to.Complete():
		return nil
	case errors.As(err, &failed) && to.Packets() == 0:
		return invocation.ErrReported // standard error has it
	case err == nil:
		err = errors.New("it was cut off")
	}
	return fmt.Errorf("the capture has not ended as it should; %d packets came: %w", to.Packets(), err)
}

// started waits for the pod of the Job.
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

// events are what the cluster says of a Job that makes no pod.
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

// remove removes the Job with its pod, also if ctx has ended.
func (c *capture) remove(ctx context.Context, job string) error {
	args := []string{"--namespace=" + c.client.Namespace, "delete", "job", job}
	if _, err := c.client.RunFor(context.WithoutCancel(ctx), removal, nil,
		append(args, "--ignore-not-found", "--wait=false", "--cascade=background")...); err != nil {
		return fmt.Errorf("the Job %s/%s may be left for a minute: %w", c.client.Namespace, job, err)
	}
	return nil
}
