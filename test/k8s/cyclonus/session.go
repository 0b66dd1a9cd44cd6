// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/kube"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/retry"
)

// pace is the minimum interval between requests to a pod. cyclonus retries while an answer is wrong, and a change of
// the cluster takes time.
const pace = 500 * time.Millisecond

// pods is cyclonus's interface to a cluster. Unlike cyclonus's own implementation, it starts one program in each pod,
// which handles all batches of probes. Starting a program for each of the 324 probes of a round takes half a minute.
type pods struct {
	*kube.Kubernetes
	probe string // the program in the pods

	mu       sync.Mutex
	sessions map[string]*session // by namespace/name of the pod, guarded by mu
}

func newPods(config *rest.Config, probe string) (*pods, error) {
	// The harness is the only client on the machine.
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return &pods{
		Kubernetes: &kube.Kubernetes{ClientSet: client, RestConfig: config},
		probe:      probe, sessions: map[string]*session{},
	}, nil
}

// SetPodLabels is cyclonus's method with a retry on conflicts, since it reads and writes the pod. cyclonus's
// interface has no context.
func (p *pods) SetPodLabels(namespace, name string, labels map[string]string) (*v1.Pod, error) {
	ctx, in := context.Background(), p.ClientSet.CoreV1().Pods(namespace)
	var pod *v1.Pod
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() (err error) {
		if pod, err = in.Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		pod.Labels = labels
		pod, err = in.Update(ctx, pod, metav1.UpdateOptions{})
		return err
	})
	return pod, err
}

// ExecuteRemoteCommand is called by cyclonus's batch runner, with a batch of probes as the last word of the command.
// It returns standard output, standard error, the command's error, and the error of executing it.
func (p *pods) ExecuteRemoteCommand(namespace, pod, container string, command []string) (string, string, error, error) {
	name := namespace + "/" + pod
	p.mu.Lock()
	s := p.sessions[name]
	if s == nil {
		s = p.open(namespace, pod, container)
		p.sessions[name] = s
	}
	p.mu.Unlock()
	answer, err := s.ask(command[len(command)-1])
	if err != nil {
		// Another pod with this name may be created, or the program may be restarted.
		s.close()
		p.mu.Lock()
		delete(p.sessions, name)
		p.mu.Unlock()
		return "", "", nil, fmt.Errorf("ask %s: %w", name, err)
	}
	return answer, "", nil, nil
}

// close ends the program in every pod.
func (p *pods) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sessions {
		s.close()
	}
}

// session is the running program in one pod. One caller uses it at a time.
type session struct {
	questions *io.PipeWriter
	answers   *bufio.Reader
	next      time.Time // earliest time of the next request
	close     func()
}

func (p *pods) open(namespace, pod, container string) *session {
	request := p.ClientSet.CoreV1().RESTClient().Post().
		Namespace(namespace).Resource("pods").Name(pod).SubResource("exec").
		VersionedParams(&v1.PodExecOptions{
			Container: container, Command: []string{p.probe}, Stdin: true, Stdout: true,
		}, scheme.ParameterCodec)
	stdin, questions := io.Pipe()
	answers, stdout := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		executor, err := remotecommand.NewSPDYExecutor(p.RestConfig, "POST", request.URL())
		if err == nil {
			err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout})
		}
		if err == nil {
			err = io.EOF
		}
		stdin.CloseWithError(err)
		stdout.CloseWithError(err)
	}()
	return &session{
		questions: questions, answers: bufio.NewReader(answers),
		close: sync.OnceFunc(func() {
			_ = questions.Close()
			cancel()
			<-ended
		}),
	}
}

// ask sends a batch, and returns the line with the answer.
func (s *session) ask(batch string) (string, error) {
	time.Sleep(time.Until(s.next)) // the pace
	s.next = time.Now().Add(pace)
	answer := make(chan error, 1)
	var line string
	go func() {
		_, err := s.questions.Write([]byte(batch + "\n"))
		if err == nil {
			line, err = s.answers.ReadString('\n')
		}
		answer <- err
	}()
	select {
	case err := <-answer:
		return line, err
	case <-time.After(time.Minute):
		s.close()
		return "", fmt.Errorf("no answer, %w", <-answer)
	}
}

// names returns unique names of the cases. The second case with a description gets the suffix " #2".
func names(descriptions []string) []string {
	seen := map[string]int{}
	all := slices.Clone(descriptions)
	for i, d := range descriptions {
		if seen[d]++; seen[d] > 1 {
			all[i] = fmt.Sprintf("%s #%d", d, seen[d])
		}
	}
	return all
}
